"""Floor 3: how requests and answers are written. JSON and Arrow in, model requests out; model answers in, bytes out."""
