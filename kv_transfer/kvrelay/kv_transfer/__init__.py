"""The hand-off: latents written by prefill ranks straight into pages that a decode node has reserved."""
