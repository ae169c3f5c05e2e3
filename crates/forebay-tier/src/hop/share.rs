//! Which files of a step a mover copies.

use std::collections::BTreeSet;

use forebay_checkpoint::commit::{FileRef, MANIFEST_PREFIX};
use forebay_error::{Code, Error, Result};
use forebay_store::is_data;

/// Numbers beyond all ranks, for nodes that have copies alone.
const BEYOND_MAX: u32 = 1 << 20;

/// The files of some ranks: a file belongs to the rank in its name, the manifest to the rank that wrote it. Movers
/// share a step when every rank is in the share of one of them; one in none is never moved, and the step never
/// committed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Share {
    mover: u32,
    movers: u32,
    /// `None`: those whose number leaves the mover's when it is divided by the movers.
    ranks: Option<BTreeSet<u32>>,
    /// And these files, by name.
    files: BTreeSet<String>,
}

/// How a file stands to a node's drive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Here {
    /// It is not there, or a copy that its owner brings.
    No,
    /// It is of a rank of this node.
    Own,
    /// A copy, left to this node: its owner is gone.
    Left,
}

impl Share {
    /// All files: one mover.
    pub fn all() -> Self {
        Self::of(0, 1)
    }

    /// Every `movers`-th rank, from `mover` on.
    pub fn of(mover: u32, movers: u32) -> Self {
        Self { mover, movers, ranks: None, files: BTreeSet::new() }
    }

    /// These ranks, those of a node as a rule; `mover` is this mover's number, which no other has.
    pub fn of_ranks(mover: u32, movers: u32, ranks: impl IntoIterator<Item = u32>) -> Self {
        let ranks = Some(ranks.into_iter().collect());
        Self { mover, movers, ranks, files: BTreeSet::new() }
    }

    /// What a node brings of a step whose data lie on the drives of several nodes: the files of its own ranks, and
    /// copies that are left to it, file by file, with what else is of their ranks. Files of ranks without data are
    /// brought with those of the first rank that has some. The node's number is its first own rank, which no other node
    /// has; that of one with copies alone is beyond all ranks, and follows from `number`, the drive's. `None` where
    /// there is nothing for it to bring.
    ///
    /// Errors: those of `number`.
    pub(super) fn of_node(
        files: &[FileRef],
        here: impl Fn(&FileRef) -> Here,
        number: impl FnOnce() -> Result<u64>,
    ) -> Result<Option<Self>> {
        let rank = |file: &FileRef| rank_of(&file.name).unwrap_or(0);
        let data = || files.iter().filter(|file| is_data(&file.name));
        let those = |how: Here| -> BTreeSet<u32> {
            data().filter(|file| here(file) == how).map(rank).collect()
        };
        let all: BTreeSet<u32> = data().map(rank).collect();
        let (mut own, left) = (those(Here::Own), those(Here::Left));
        let movers = files.iter().map(rank).max().map_or(1, |last| last.saturating_add(1));
        let mover = match own.first() {
            Some(first) => *first,
            None if left.is_empty() => return Ok(None),
            None => {
                let beyond = u32::try_from(number()? % u64::from(BEYOND_MAX)).unwrap_or_default();
                movers.saturating_add(beyond)
            }
        };
        let without = |file: &FileRef| !all.contains(&rank(file));
        let is_first = |ranks: &BTreeSet<u32>| all.first().is_some_and(|rank| ranks.contains(rank));
        let is_left = |file: &&FileRef| match is_data(&file.name) {
            true => here(file) == Here::Left,
            false => left.contains(&rank(file)) || (is_first(&left) && without(file)),
        };
        let copies = files.iter().filter(is_left).map(|file| file.name.clone()).collect();
        if is_first(&own) {
            own.extend(files.iter().filter(|file| without(file)).map(rank));
        }
        Ok(Some(Self { files: copies, ..Self::of_ranks(mover, movers, own) }))
    }

    /// This mover's number, and how many there are.
    pub fn number(&self) -> (u32, u32) {
        (self.mover, self.movers)
    }

    /// Whether a file is in it. A name without a rank counts as rank 0's.
    pub fn has(&self, file: &FileRef) -> bool {
        let rank = rank_of(&file.name).unwrap_or(0);
        match &self.ranks {
            Some(ranks) => ranks.contains(&rank) || self.files.contains(&file.name),
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
            let here = |file: &FileRef| if own.contains(&file.name) { Here::Own } else { Here::No };
            Share::of_node(&files, here, || unreachable!("it has ranks of its own, or nothing"))
                .unwrap()
        };
        let nodes = [node(&[3, 4]).unwrap(), node(&[1, 2]).unwrap()];
        for file in &files {
            assert_eq!(nodes.iter().filter(|node| node.has(file)).count(), 1, "{file:?}");
        }
        assert_eq!(nodes.map(|node| node.number()), [(3, 6), (1, 6)]);
        assert_eq!(node(&[]), None);
    }

    #[test]
    fn copies_that_are_left_are_brought_file_by_file_under_a_number_of_ones_own() {
        let names = [
            "00000abc-1_1_0.distcp",
            "00000abc-1_1_1.distcp",
            "00000abc-1_2_0.distcp",
            "00000abc-1_1_rng.json",
            "forebay.manifest-00000abc-1_0",
        ];
        let files = names.map(|name| FileRef { name: name.to_owned(), bytes: 1 });
        let node = |here: [Here; 3], drive: u64| {
            let here = |file: &FileRef| {
                files.iter().position(|f| f == file).and_then(|at| here.get(at)).copied().unwrap()
            };
            Share::of_node(&files, here, || Ok(drive)).unwrap()
        };
        let has = |share: &Share| [0, 1, 2, 3, 4].map(|at| share.has(&files[at]));
        // One file of the node that is gone, and this one's own: the number is its own rank's.
        let buddy = node([Here::No, Here::Left, Here::Own], 7).unwrap();
        assert_eq!(has(&buddy), [false, true, true, true, true]);
        assert_eq!(buddy.number(), (2, 3));
        // Its other file, on a node without ranks.
        let other = node([Here::Left, Here::No, Here::No], 7).unwrap();
        assert_eq!(has(&other), [true, false, false, true, true]);
        assert_eq!(other.number(), (10, 3));
        assert_eq!(node([Here::No; 3], 7), None);
    }
}
