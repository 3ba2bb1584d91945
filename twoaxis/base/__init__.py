"""What every room builds on: files, spec strings, options, registries, progress. Imports nothing of twoaxis."""
