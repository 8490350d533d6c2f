"""From documents to packed batches: sources, tokenizer, token store, packing, Grain pipeline."""
