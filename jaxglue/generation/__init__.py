"""The engine of generation: requests scheduled, decoded over paged caches, sampled and held to grammars; scores."""
