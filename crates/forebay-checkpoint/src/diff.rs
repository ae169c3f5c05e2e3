//! Two checkpoints compared, tensor by tensor, through bounded memory; each side may be any model.
//!
//! Elements are equal if their bits are: NaN equals the same NaN, and 0 is not -0 (a difference of nothing). Tensors
//! of different types or sides are not looked into. Objects that are plain data are compared as JSON, in which the
//! order of the keys of a dict says nothing and a tuple is a list; others by the bytes of their archives.

mod elements;
mod objects;

use forebay_error::{Code, Error, Result};
use forebay_format::parallel;

pub use elements::Difference;

use crate::open::Place;
use crate::progress::Progress;
use crate::stream::{Loaded, Loader, Source, TensorInfo, batches};

/// Bytes that one thread compares at a time.
const PIECE_BYTES: usize = 1 << 20;

/// What became of one name.
#[derive(Clone, Debug, PartialEq)]
pub enum Change {
    /// It is in the first alone.
    OnlyInA,
    /// It is in the second alone.
    OnlyInB,
    /// A tensor in one, an object in the other.
    Kind,
    /// Another type or other sides: as text, of the first and the second.
    Form(String, String),
    /// Elements differ.
    Values(Difference),
    /// An object is another: as JSON, where it is short and plain, of the first and the second.
    Object(Option<String>, Option<String>),
}

/// What is different.
#[derive(Clone, Debug, Default)]
pub struct Diff {
    /// Names that differ, in their order, and how.
    pub changes: Vec<(String, Change)>,
    /// Tensors that are the same in both.
    pub equal_tensors: usize,
    /// Objects that are the same in both.
    pub equal_objects: usize,
    /// Bytes of tensors that were compared, of one side.
    pub bytes: u64,
    /// What is odd on either side.
    pub warnings: Vec<String>,
}

impl Diff {
    /// Whether nothing is different.
    pub fn is_equal(&self) -> bool {
        self.changes.is_empty()
    }
}

/// A tensor of both sides that can be compared: the places in their lists.
struct Pair {
    a: usize,
    b: usize,
    found: Difference,
}

/// Compares what is at two places; only names that `wanted` takes.
///
/// Errors: those of opening and reading, among them `checksum`.
pub fn diff(
    a: impl Into<Place>,
    b: impl Into<Place>,
    wanted: impl Fn(&str) -> bool,
    progress: &impl Progress,
) -> Result<Diff> {
    let (a, b) = (Source::open(a)?, Source::open(b)?);
    let mut diff = Diff::default();
    for source in [&a, &b] {
        diff.warnings.extend(source.warnings().iter().cloned());
    }
    let mut pairs = pair(&a, &b, &wanted, &mut diff);
    objects::compare(&a, &b, &wanted, &mut diff)?;
    compare(&a, &b, &mut pairs, progress)?;
    for pair in pairs {
        let Some(info) = a.tensors.get(pair.a) else { continue };
        diff.bytes += info.bytes;
        match pair.found.differing {
            0 => diff.equal_tensors += 1,
            _ => diff.changes.push((info.name.clone(), Change::Values(pair.found))),
        }
    }
    diff.changes.sort_by(|(a, _), (b, _)| a.cmp(b));
    Ok(diff)
}

/// Finds the tensors that both have in one form; the others are noted.
fn pair(a: &Source, b: &Source, wanted: &impl Fn(&str) -> bool, diff: &mut Diff) -> Vec<Pair> {
    let mut pairs = Vec::new();
    for (place, info) in a.tensors.iter().enumerate().filter(|(_, info)| wanted(&info.name)) {
        match find(b, &info.name) {
            Some((other, same)) if (info.dtype, &info.shape) == (same.dtype, &same.shape) => {
                pairs.push(Pair { a: place, b: other, found: Difference::new(info) });
            }
            Some((_, other)) => {
                let change = Change::Form(form(info), form(other));
                diff.changes.push((info.name.clone(), change));
            }
            None if b.has_object(&info.name) => {
                diff.changes.push((info.name.clone(), Change::Kind));
            }
            None => diff.changes.push((info.name.clone(), Change::OnlyInA)),
        }
    }
    for info in b.tensors.iter().filter(|info| wanted(&info.name)) {
        if find(a, &info.name).is_none() {
            let change = if a.has_object(&info.name) { Change::Kind } else { Change::OnlyInB };
            diff.changes.push((info.name.clone(), change));
        }
    }
    pairs
}

fn find<'s>(source: &'s Source, name: &str) -> Option<(usize, &'s TensorInfo)> {
    let place = source.tensors.binary_search_by(|info| info.name.as_str().cmp(name)).ok()?;
    Some((place, source.tensors.get(place)?))
}

fn form(info: &TensorInfo) -> String {
    format!("{} {:?}", info.dtype, info.shape)
}

/// Compares the elements of pairs, in the order of the first side's files.
fn compare(a: &Source, b: &Source, pairs: &mut [Pair], progress: &impl Progress) -> Result<()> {
    pairs.sort_by_key(|pair| a.tensors.get(pair.a).map(|info| info.place));
    let order: Vec<usize> = pairs.iter().map(|pair| pair.a).collect();
    let infos = order.iter().filter_map(|&tensor| a.tensors.get(tensor));
    progress.total(infos.fold(0_u64, |sum, info| sum.saturating_add(info.bytes)));
    let mut places = vec![usize::MAX; a.tensors.len()];
    for (number, pair) in pairs.iter().enumerate() {
        if let Some(place) = places.get_mut(pair.a) {
            *place = number;
        }
    }
    let (mut of_a, mut of_b) = (Loader::new()?, Loader::new()?);
    let go = || progress.add(0);
    for batch in batches(&a.tensors, &order) {
        let batch = batch?;
        let mut others = Vec::with_capacity(batch.len());
        for want in &batch {
            let pair = places.get(want.tensor).and_then(|&number| pairs.get(number));
            let pair = pair.ok_or_else(|| lost("a tensor without a partner"))?;
            others.push(crate::stream::Want { tensor: pair.b, ..want.clone() });
        }
        let left = of_a.load(a, batch, &go)?;
        let right = of_b.load(b, others, &go)?;
        compare_batch((a, &left), &right, &places, pairs, progress)?;
    }
    Ok(())
}

fn lost(what: &str) -> Error {
    Error::new(Code::Internal, what)
}

/// Compares a batch: pieces of all of its boxes, on several threads.
fn compare_batch(
    (a, left): (&Source, &Loaded),
    right: &Loaded,
    places: &[usize],
    pairs: &mut [Pair],
    progress: &impl Progress,
) -> Result<()> {
    let mut pieces: Vec<(usize, usize, usize)> = Vec::new();
    for (part, (want, _)) in left.parts.iter().enumerate() {
        let number = places.get(want.tensor).copied().unwrap_or(usize::MAX);
        let partner = pairs.get(number).map(|pair| pair.b);
        // Each side has its boxes in the order of its own files.
        let mut others = right.parts.iter().enumerate();
        let other = others
            .find(|(_, (other, _))| Some(other.tensor) == partner && other.offset == want.offset);
        let (other, _) = other.ok_or_else(|| lost("a box without a partner"))?;
        let starts = (0..want.bytes as usize).step_by(PIECE_BYTES);
        pieces.extend(starts.map(|start| (part, other, start)));
    }
    let found = parallel::map(&pieces, |&(part, other, start)| {
        let (ours, theirs) = (left.bytes(part), right.bytes(other));
        let piece = start..ours.len().min(start + PIECE_BYTES);
        let (ours, theirs) = (ours.get(piece.clone()), theirs.get(piece));
        let (ours, theirs) =
            ours.zip(theirs).ok_or_else(|| lost("boxes of one tensor differ in length"))?;
        progress.add(ours.len() as u64)?;
        let (want, _) = left.parts.get(part).ok_or_else(|| lost("a piece without its box"))?;
        let info = a.tensors.get(want.tensor).ok_or_else(|| lost("a box without its tensor"))?;
        Ok(elements::compare(info.dtype, ours, theirs))
    });
    for (&(part, ..), found) in pieces.iter().zip(found) {
        let number = left.parts.get(part).and_then(|(want, _)| places.get(want.tensor));
        if let Some(pair) = number.and_then(|&number| pairs.get_mut(number)) {
            pair.found.add(&found?);
        }
    }
    Ok(())
}
