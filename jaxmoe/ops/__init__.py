"""Operators: one folder each with a contract, a numpy oracle and implementations in order of preference."""
