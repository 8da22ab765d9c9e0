//! Integration tests: golden replies and the op case table.
