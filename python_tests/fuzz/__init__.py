"""A fuzzer: `make fuzz MINUTES=10` attacks operators, files and interrupted runs with random cases."""
