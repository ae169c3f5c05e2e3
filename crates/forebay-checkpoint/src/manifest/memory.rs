//! Bytes in memory as a source: manifests that were just built, or read as a whole.

use std::io;

use forebay_engine::RangeSource;
use forebay_error::Result;

/// Bytes in memory.
#[derive(Clone, Debug)]
pub struct MemorySource {
    name: String,
    bytes: Vec<u8>,
}

impl MemorySource {
    /// `name` is what errors call it.
    pub fn new(name: impl Into<String>, bytes: Vec<u8>) -> Self {
        Self { name: name.into(), bytes }
    }
}

impl RangeSource for MemorySource {
    fn name(&self) -> String {
        self.name.clone()
    }

    fn len(&self) -> u64 {
        self.bytes.len() as u64
    }

    fn read_at(&self, into: &mut [u8], offset: u64) -> io::Result<usize> {
        let rest = usize::try_from(offset).ok().and_then(|at| self.bytes.get(at..));
        let rest = rest.unwrap_or_default();
        let count = rest.len().min(into.len());
        for (to, from) in into.iter_mut().zip(rest) {
            *to = *from;
        }
        Ok(count)
    }

    fn check_unchanged(&self) -> Result<()> {
        Ok(())
    }
}
