"""What all backends on a GPU share: a tile of attention, launches, codes, and answers of others put right."""
