"""Floor 9: `sluiceway demo`, a real Spark pipeline fed by a real queue, with the books checked at the end."""
