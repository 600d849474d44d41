"""The engine: one controller per replica and one rank per device; the only home of torch."""
