"""Exports of captures to other tools' formats."""
