"""`medha`: the commands a person types; services are started as processes, never imported."""
