"""A deployment as a whole: starting it, finding it, keeping its controller alive."""
