"""The pages, one module per navigation entry: API calls and template variables."""
