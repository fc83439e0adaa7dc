"""Replays a capture: plan it, execute it, verify it. Does not depend on how captures are made."""
