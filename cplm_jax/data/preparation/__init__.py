"""``cplm prepare``: from raw files to tokenised shards, in parallel, and restartable."""
