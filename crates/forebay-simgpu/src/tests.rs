//! The rules, each broken once. **unsafe**: through the C functions, as a program would.
