"""How many pages a pool has when nobody says. Pure."""

from __future__ import annotations

from kvrelay.core.errors import SettingsError
from kvrelay.core.layout import PageLayout

# On a GPU the pool is what the memory is for; some is left for activations.
_GPU_SHARE = 0.85
# A CPU node shares its machine with others and touches every page at start.
_CPU_SHARE = 0.125
_CPU_LONGEST_REQUESTS = 8


def pool_pages(layout: PageLayout, *, pages: int, mib: int, free_bytes: int, longest_tokens: int, on_gpu: bool) -> int:
    """Return the pages of a pool: as many as asked for, else as fit into what is asked for, else a share of the memory.

    Args:
        pages, mib: what the settings say; 0 = nothing.
        free_bytes: memory that is free after the weights were loaded.
        longest_tokens: of one request; on CPUs no more is taken than a few of these need.

    Raises:
        SettingsError: not even one page fits; names the bytes.
    """
    if pages:
        return pages
    room_bytes = mib << 20 if mib else int(free_bytes * (_GPU_SHARE if on_gpu else _CPU_SHARE))
    fitting = room_bytes // layout.page_bytes_all_layers
    if fitting < 1:
        raise SettingsError(f"a page needs {layout.page_bytes_all_layers} bytes, {room_bytes} are there for the pool")
    if mib or on_gpu:
        return fitting
    return min(fitting, _CPU_LONGEST_REQUESTS * layout.pages_for(longest_tokens))
