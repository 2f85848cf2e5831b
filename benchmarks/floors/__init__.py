"""The least that something can cost, with as little of Quartet in it as possible: the base of comparisons."""
