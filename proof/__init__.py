"""What tests, proof.verify, exercises and lessons share: one device beside many, ranks of this
machine, small models, synthetic data, mutations. Imports anything. Begin with parity.py."""
