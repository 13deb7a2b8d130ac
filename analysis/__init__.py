"""Pictures and tables from records."""
