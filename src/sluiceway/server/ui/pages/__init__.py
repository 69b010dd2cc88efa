"""The pages, a module for each room of the navigation: what they ask the API, and what of it their templates are told."""
