//! Objects of several blocks, which may be in the hands of several threads: they are looked through when all of their
//! blocks were found right, so that a damaged one is told of once, and one after the other, so that no more than one
//! pickle of hundreds of mebibytes is in memory, however many threads there are.

use std::collections::{BTreeSet, HashSet};

/// By file and item.
#[derive(Default)]
pub(super) struct Large {
    found: BTreeSet<(usize, usize)>,
    broken: HashSet<(usize, usize)>,
}

impl Large {
    /// Takes what a part of a file has: large objects that begin there, and items of which a byte there is wrong.
    pub(super) fn add(&mut self, file: usize, large: &[usize], broken: &[usize]) {
        self.found.extend(large.iter().map(|&item| (file, item)));
        self.broken.extend(broken.iter().map(|&item| (file, item)));
    }

    /// Those without a fault, in the order of files and items.
    pub(super) fn whole(self) -> impl Iterator<Item = (usize, usize)> {
        let Self { found, broken } = self;
        found.into_iter().filter(move |place| !broken.contains(place))
    }
}
