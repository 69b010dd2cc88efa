"""Floor 3: the ports carried out on real storage, real time and real randomness."""
