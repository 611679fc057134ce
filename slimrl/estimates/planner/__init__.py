"""What a recipe needs of a cluster that need not be there: parameters, memory, time. No GPU and no process is used."""
