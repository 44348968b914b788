"""Actor systems: long-lived roles that are declared, planned, launched as a whole, called and scaled."""
