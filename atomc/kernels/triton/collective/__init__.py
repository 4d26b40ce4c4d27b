"""All-reduce over the memory of several GPUs, alone and with a norm."""
