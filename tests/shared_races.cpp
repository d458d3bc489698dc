// See shared_races.h. The accesses themselves come from the hooks of -fsanitize=thread, without its library.

#include "shared_races.h"

#include <algorithm>
#include <vector>

namespace {

constexpr int WORD = 4;  // bytes that are watched as one

struct Access {
  int by = -1;  // a thread, or BLOCK_THREADS + a barrier of copies
  uint32_t at = 0;

  bool is_copy() const { return by >= BLOCK_THREADS; }
  bool before(const Clock& clock) const { return by < 0 || clock.times[by] >= at; }
  // Loads are through when their thread arrives at a barrier; stores may still be on their way to where copies write.
  bool stored_before_copy(const Clock& clock) const {
    return is_copy() ? before(clock) : by < 0 || clock.fenced[by] >= at;
  }
};

struct Word {
  Access store;
  std::vector<Access> loads;  // since then, the last one of each thread
};

Clock clocks[BLOCK_THREADS];
std::vector<Word> words;
uintptr_t first;

template <class Touch>
void each_word(void* at, size_t bytes, Touch touch) {
  size_t from = (uintptr_t)at - first;
  if (from >= words.size() * WORD) return;  // a thread's own memory, or the host's
  for (size_t i = from / WORD; i <= (from + bytes - 1) / WORD; i++) touch(words[i], i * WORD);
}

void load(void* at, size_t bytes) {
  each_word(at, bytes, [](Word& word, size_t offset) {
    const Clock& now = clocks[this_thread()];
    if (!word.store.before(now)) report_race(offset, word.store.is_copy());
    Access mine{this_thread(), now.times[this_thread()]};
    for (Access& load : word.loads)
      if (load.by == mine.by) return void(load = mine);
    word.loads.push_back(mine);
  });
}

void store(void* at, size_t bytes) {
  each_word(at, bytes, [](Word& word, size_t offset) {
    const Clock& now = clocks[this_thread()];
    bool ordered = word.store.before(now);
    for (Access& load : word.loads) ordered &= load.before(now);
    if (!ordered) report_race(offset, word.store.is_copy());
    word.store = {this_thread(), now.times[this_thread()]};
    word.loads.clear();
  });
}

}  // namespace

void Clock::join(const Clock& other) {
  for (size_t i = 0; i < times.size(); i++) times[i] = std::max(times[i], other.times[i]);
  for (size_t i = 0; i < fenced.size(); i++) fenced[i] = std::max(fenced[i], other.fenced[i]);
}

void watch_shared_memory(void* begin, size_t bytes) {
  first = (uintptr_t)begin;
  words.assign(bytes / WORD, {});
  for (int i = 0; i < BLOCK_THREADS; i++) clocks[i] = {}, clocks[i].times[i] = 1;
}

void release(Clock& into) {
  Clock& mine = clocks[this_thread()];
  into.join(mine);
  mine.times[this_thread()]++;  // what comes now is not part of it
}

void acquire(const Clock& from) { clocks[this_thread()].join(from); }

void fence_before_copies() {
  Clock& mine = clocks[this_thread()];
  std::transform(mine.fenced.begin(), mine.fenced.end(), mine.times.begin(), mine.fenced.begin(),
                 [](uint32_t a, uint32_t b) { return std::max(a, b); });
  mine.times[this_thread()]++;
}

void begin_copy(void* to, size_t bytes, int copy_barrier, uint32_t number) {
  each_word(to, bytes, [=](Word& word, size_t offset) {
    const Clock& now = clocks[this_thread()];
    bool ordered = word.store.stored_before_copy(now);
    for (Access& load : word.loads) ordered &= load.before(now);
    if (!ordered) report_race(offset, true);
    word.store = {BLOCK_THREADS + copy_barrier, number};
    word.loads.clear();
  });
}

extern "C" {
void __tsan_init() {}
#define HOOKS(n)                                           \
  void __tsan_read##n(void* at) { load(at, n); }           \
  void __tsan_write##n(void* at) { store(at, n); }         \
  void __tsan_unaligned_read##n(void* at) { load(at, n); } \
  void __tsan_unaligned_write##n(void* at) { store(at, n); }
HOOKS(1)
HOOKS(2)
HOOKS(4)
HOOKS(8)
HOOKS(16)
void __tsan_read_range(void* at, size_t bytes) { load(at, bytes); }
void __tsan_write_range(void* at, size_t bytes) { store(at, bytes); }
}
