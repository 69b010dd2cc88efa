"""Floor 3: implementations of the ports on real storage, real time and real randomness."""
