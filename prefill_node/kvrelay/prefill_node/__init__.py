"""One prefill node: a ring of rank processes that computes prompts and relays their latents while it computes."""
