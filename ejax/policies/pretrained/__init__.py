"""Networks that load what others trained: a picture's features, a sentence's embedding. Random weights fit as well."""
