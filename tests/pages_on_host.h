// Runs a kernel over pages on the host; included behind its source, which says what `Shared` is.

#pragma once

bool is_left_out(int id) { return left_out == id; }
void report_race(size_t, bool one_is_a_copy) { fail(one_is_a_copy ? "a race of a copy" : "a race"); }

extern "C" int shared_bytes() { return sizeof(Shared); }

// Returns what went wrong, or null.
extern "C" const char* launch(const Args* args, int head_blocks, int parts, u64 pool_bytes, int without, bool exact) {
  left_out = without, numbers = exact;
  pool_begin = args->pool, pool_end = args->pool + pool_bytes;
  forget_products();
  return run_grid(head_blocks, parts, [=] { decode(*args); });
}
