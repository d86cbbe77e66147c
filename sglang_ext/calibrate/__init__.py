"""Tables that DSPARK reads, made on the machine that will serve: speeds and temperatures."""
