//! Which files of a step a mover copies.

use std::collections::BTreeSet;

use forebay_checkpoint::commit::{FileRef, MANIFEST_PREFIX};
use forebay_error::{Code, Error, Result};
use forebay_store::is_data;

/// The files of some ranks: a file belongs to the rank in its name, the manifest to the rank that wrote it. Movers
/// share a step when every rank is in the share of one of them; one in none is never moved, and the step never
/// committed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Share {
    mover: u32,
    movers: u32,
    /// `None`: those whose number leaves the mover's when it is divided by the movers.
    ranks: Option<BTreeSet<u32>>,
}

impl Share {
    /// All files: one mover.
    pub fn all() -> Self {
        Self::of(0, 1)
    }

    /// Every `movers`-th rank, from `mover` on.
    pub fn of(mover: u32, movers: u32) -> Self {
        Self { mover, movers, ranks: None }
    }

    /// These ranks, those of a node as a rule; `mover` is this mover's number, which no other has.
    pub fn of_ranks(mover: u32, movers: u32, ranks: impl IntoIterator<Item = u32>) -> Self {
        Self { mover, movers, ranks: Some(ranks.into_iter().collect()) }
    }

    /// What a node brings of a step whose data lie on the drives of several nodes: the files of the ranks whose data
    /// are
    /// `here`. Those of ranks without data are brought by the node of the first rank that has some. The node's number
    /// is its first rank, which no other node has. `None` where no data are here.
    pub(super) fn of_node(files: &[FileRef], here: impl Fn(&FileRef) -> bool) -> Option<Self> {
        let data = || files.iter().filter(|file| is_data(&file.name));
        let ranks = |of: &mut dyn Iterator<Item = &FileRef>| -> BTreeSet<u32> {
            of.map(|file| rank_of(&file.name).unwrap_or(0)).collect()
        };
        let (all, mut own) = (ranks(&mut data()), ranks(&mut data().filter(|file| here(file))));
        let first = *own.first()?;
        if all.first() == Some(&first) {
            own.extend(ranks(&mut files.iter()).difference(&all));
        }
        let movers = ranks(&mut files.iter()).last().map_or(1, |last| last.saturating_add(1));
        Some(Self::of_ranks(first, movers, own))
    }

    /// This mover's number, and how many there are.
    pub fn number(&self) -> (u32, u32) {
        (self.mover, self.movers)
    }

    /// Whether a file is in it. A name without a rank counts as rank 0's.
    pub fn has(&self, file: &FileRef) -> bool {
        let rank = rank_of(&file.name).unwrap_or(0);
        match &self.ranks {
            Some(ranks) => ranks.contains(&rank),
            None => rank.checked_rem(self.movers) == Some(self.mover),
        }
    }

    pub(super) fn check(&self) -> Result<()> {
        if self.mover < self.movers {
            return Ok(());
        }
        let what = format!("mover {} of {} movers", self.mover, self.movers);
        Err(Error::new(Code::Usage, what))
    }
}

/// The rank in the name of a file.
pub(crate) fn rank_of(name: &str) -> Option<u32> {
    let name = name.strip_prefix(MANIFEST_PREFIX).unwrap_or(name);
    name.split('_').nth(1)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_file_is_in_the_share_of_one_mover() {
        let names = [
            "00000abc-1_0_0.distcp",
            "00000abc-1_5_1.distcp",
            "00000abc-1_3_notes_1.txt",
            "forebay.manifest-00000abc-1_2",
            "odd",
        ];
        for movers in 1..6 {
            for name in names {
                let file = FileRef { name: name.to_owned(), bytes: 1 };
                let count = (0..movers).filter(|mover| Share::of(*mover, movers).has(&file));
                assert_eq!(count.count(), 1, "{name} of {movers}");
            }
        }
        let node = Share::of_ranks(1, 2, [2, 3]);
        let has = |name: &str| node.has(&FileRef { name: name.to_owned(), bytes: 1 });
        assert_eq!(names.map(has), [false, false, true, true, false]);
        assert_eq!(Share::of(2, 2).check().unwrap_err().code(), Code::Usage);
    }

    #[test]
    fn every_file_of_split_data_is_brought_by_one_node() {
        let data = |rank: u32| format!("00000abc-1_{rank}_0.distcp");
        // Rank 0 and rank 5 have no data; rank 5 wrote the manifest, and rank 4 a side file.
        let mut names: Vec<String> = [1, 2, 3, 4].map(data).to_vec();
        names.extend(
            ["00000abc-1_4_rng.json", "forebay.manifest-00000abc-1_5", "odd"].map(str::to_owned),
        );
        let files: Vec<FileRef> =
            names.into_iter().map(|name| FileRef { name, bytes: 1 }).collect();
        let node = |ranks: &[u32]| {
            let own: BTreeSet<String> = ranks.iter().copied().map(data).collect();
            Share::of_node(&files, |file| own.contains(&file.name))
        };
        let nodes = [node(&[3, 4]).unwrap(), node(&[1, 2]).unwrap()];
        for file in &files {
            assert_eq!(nodes.iter().filter(|node| node.has(file)).count(), 1, "{file:?}");
        }
        assert_eq!(nodes.map(|node| node.number()), [(3, 6), (1, 6)]);
        assert_eq!(node(&[]), None);
    }
}
