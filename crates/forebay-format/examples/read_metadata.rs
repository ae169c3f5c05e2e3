//! Reads a `.metadata` and says what it cost: `cargo run --release --example read_metadata -- FILE`.
//!
//! `tests/data/make_large_metadata.py` makes files of any size with torch's own classes.

#![expect(clippy::print_stdout, reason = "a tool that reports to its user")]

use forebay_error::{Error, Result};
use forebay_format::dcp::metadata::{DcpMetadata, EntryKind};
use std::time::Instant;

fn main() -> Result<()> {
    let path = std::env::args().nth(1).unwrap_or_else(|| ".metadata".into());
    let start = Instant::now();
    let bytes = std::fs::read(&path).map_err(|error| Error::io("cannot read", error).at(&path))?;
    let file_s = start.elapsed().as_secs_f64();
    let start = Instant::now();
    let metadata = DcpMetadata::read(&bytes)?;
    let parse_s = start.elapsed().as_secs_f64();
    let chunks: usize = metadata
        .entries()
        .map(|entry| match entry.kind {
            EntryKind::Tensor { chunks, .. } => chunks.len(),
            EntryKind::Object { .. } => 1,
        })
        .sum();
    let (mb, entries) = (bytes.len() as f64 / 1e6, metadata.entries().len());
    println!("{mb:.1} MB: {entries} entries, {chunks} chunks");
    println!("{parse_s:.3} s to parse and check, {file_s:.3} s to read the file");
    for warning in metadata.warnings() {
        println!("warning: {warning}");
    }
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    for line in status.lines().filter(|line| line.starts_with("VmHWM")) {
        println!("{line}");
    }
    Ok(())
}
