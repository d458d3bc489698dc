"""What the commands agree on when nobody says otherwise."""

from __future__ import annotations

ENDPOINT = "127.0.0.1:8400"  # where `up` listens and where the client commands look
