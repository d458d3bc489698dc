"""What a reader's session knows of one rank that it has let in: what it announced, what landed, and its fence."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvrelay.kv_transfer.values import FenceProof, Manifest, Part

# A notice follows its write within milliseconds; of a rank whose writes have all ended nothing more comes after this.
_LOST_AFTER_S = 2.0


@dataclass(slots=True)
class AttachedRank:
    """Owned by the session. Questions change nothing; the session asks them before it adds a part."""

    stream_id: bytes  # of the stream by which it was let in
    stream_open: bool = True
    listed: dict[int, Part] | None = None  # its manifest
    landed: dict[int, Part] = field(default_factory=dict)  # verified parts
    proof: FenceProof | None = None
    quiet_since_s: float | None = None  # all its writes have ended, and nothing landed since

    @property
    def complete(self) -> bool:
        # Every landed part is a listed one, so equal numbers mean equal sets.
        return self.listed is not None and len(self.landed) == len(self.listed)

    def refusal_of_part(self, part: Part) -> str | None:
        """Return why a part that landed cannot be one of this rank's, or None."""
        if part.part_id in self.landed:
            return "announced twice, differently"
        if self.listed is not None and self.listed.get(part.part_id) != part:
            return "not what the manifest says"
        return None

    def add_part(self, part: Part, now_s: float) -> None:
        self.landed[part.part_id] = part
        if self.proof is not None:
            self.quiet_since_s = now_s

    def take_manifest(self, manifest: Manifest) -> str | None:
        """Note what a manifest lists; when it cannot be true, note nothing and return why."""
        listed = {part.part_id: part for part in manifest.parts}
        if len(listed) != len(manifest.parts):
            return "its manifest names a part twice"
        if any(listed.get(part_id) != part for part_id, part in self.landed.items()):
            return "a part landed that is not what the manifest says"
        self.listed = listed
        return None

    def lost(self, heard_until_s: float) -> str | None:
        """Return what is missing when all its writes have ended and yet a part was not announced here; else None.

        Args:
            heard_until_s: all that had landed by then was reported.
        """
        quiet_s = 0.0 if self.quiet_since_s is None else heard_until_s - self.quiet_since_s
        if quiet_s < _LOST_AFTER_S or self.listed is None or self.complete:
            return None
        return f"{len(self.listed) - len(self.landed)} of its {len(self.listed)} parts never landed"
