//! Whether pieces cover a tensor: all of it, and nothing twice.
//!
//! Exact for any boxes, and no search for pairs. Let `f` be the number of pieces that hold an element, less one: the
//! pieces are right where `f` is zero everywhere. Along the first dimension `f` changes only where a piece starts or
//! ends; the change is a sum of boxes of one dimension less, those that start counted +1 and those that end -1. Sorted,
//! equal boxes that end and start at one place cancel, as they do at every cut of a grid. What does not cancel is
//! itself a function that must be zero, which the next dimension decides. The first place where a change is not zero
//! is where `f` stops being zero: `f` there *is* the change, so following it down gives the first bad element in
//! row-major order, and whether it is held too often or not at all.
//!
//! Cost: a sort of two events a piece for grids of any cuts. In the worst case (no two boxes share a face) the events
//! double with each dimension that is cut at all; over 2^28 of them it gives up with `unsupported`.

use std::collections::HashMap;

use forebay_error::{Code, Error, Result};

use crate::{MAX_DIMS, Region, ShowShape};

/// Events sorted in one check, at the most: about 15 s.
const MAX_EVENTS: usize = 1 << 28;

/// What the same region twice means.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Repeats {
    /// An overlap.
    Overlap,
    /// Replicas: they count once.
    AreReplicas,
}

/// Checks that the pieces lie inside a tensor of this shape, do not overlap and leave nothing out. Pieces without
/// elements are fine anywhere inside; a tensor without dimensions is one piece without dimensions.
///
/// Errors: `out_of_bounds` names the piece; `overlap` names two pieces, by their numbers from 0 on, that share the
/// first element held twice; `hole` names a box, as long as it gets, from the first element that no piece holds.
/// `unsupported` for over [`MAX_DIMS`] dimensions, 2^32 - 1 pieces, and pieces more irregular than the opening of this
/// module allows.
pub fn check_cover<'a, I>(shape: &[u64], pieces: I, repeats: Repeats) -> Result<()>
where
    I: IntoIterator<Item = &'a Region>,
    I::IntoIter: Clone,
{
    let pieces = pieces.into_iter();
    let cut = check_bounds(shape, pieces.clone())?;
    if shape.contains(&0) {
        return Ok(());
    }
    let mut levels = Levels::new(&cut);
    let mut terms = levels.terms(pieces.clone())?;
    if repeats == Repeats::AreReplicas {
        terms.sort_unstable_by_key(|term| (term.lo, term.hi, term.rest));
        terms.dedup();
    }
    let whole = Region::whole(shape);
    terms.push(Term { weight: -1, ..levels.term(&whole)? });
    match levels.first_fault(0, &terms)? {
        None => Ok(()),
        Some((point, excess)) => {
            let mut at = vec![0; shape.len()];
            for (&dim, coordinate) in cut.iter().zip(point.into_iter().rev()) {
                if let Some(place) = at.get_mut(dim) {
                    *place = coordinate;
                }
            }
            Err(if excess < 0 {
                hole(shape, &at, pieces)
            } else {
                overlap(shape, &at, pieces, repeats)
            })
        }
    }
}

/// Checks the bounds of all pieces; gives the dimensions that some piece with elements does not span.
fn check_bounds<'a>(shape: &[u64], pieces: impl Iterator<Item = &'a Region>) -> Result<Vec<usize>> {
    let dims = shape.len();
    if dims > MAX_DIMS {
        let what = format!("tensor has {dims} dimensions, over {MAX_DIMS}");
        return Err(Error::new(Code::Unsupported, what));
    }
    let mut cut = vec![false; dims];
    for (number, piece) in pieces.enumerate() {
        if piece.offsets.len() != dims || piece.sizes.len() != dims {
            let (shape, has) = (ShowShape(shape), piece.sizes.len());
            let what = format!("piece {number} has {has} dimensions, the tensor {shape} {dims}");
            return Err(Error::new(Code::OutOfBounds, what));
        }
        if piece.check_within(shape).is_err() {
            let what = format!("piece {number} {piece} leaves the tensor {}", ShowShape(shape));
            return Err(Error::new(Code::OutOfBounds, what));
        }
        if !piece.is_empty() {
            for ((cut, size), side) in cut.iter_mut().zip(&piece.sizes).zip(shape) {
                *cut |= size != side;
            }
        }
    }
    Ok((0..dims).zip(cut).filter_map(|(dim, cut)| cut.then_some(dim)).collect())
}

/// A box, from some level on, and how often it counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Term {
    lo: u64,
    hi: u64,
    /// The box's sides from the next level on: its number in the table of that level.
    rest: u32,
    weight: i64,
}

/// A start or end of terms.
#[derive(Clone, Copy, Debug)]
struct Event {
    at: u64,
    rest: u32,
    weight: i64,
}

/// The sides of boxes from one dimension on, each kept once.
#[derive(Debug, Default)]
struct Table {
    numbers: HashMap<(u64, u64, u32), u32>,
    sides: Vec<(u64, u64, u32)>,
}

impl Table {
    fn number(&mut self, sides: (u64, u64, u32)) -> Result<u32> {
        let next = u32::try_from(self.sides.len())
            .map_err(|_| Error::new(Code::Unsupported, "a tensor has over 2^32 - 1 pieces"))?;
        let number = *self.numbers.entry(sides).or_insert(next);
        if number == next {
            self.sides.push(sides);
        }
        Ok(number)
    }
}

/// The dimensions that are cut, one a level, and the tables of all levels but the first.
struct Levels<'a> {
    cut: &'a [usize],
    tables: Vec<Table>,
    events: usize,
}

impl<'a> Levels<'a> {
    fn new(cut: &'a [usize]) -> Self {
        let tables = cut.iter().skip(1).map(|_| Table::default()).collect();
        Self { cut, tables, events: 0 }
    }

    fn terms<'b>(&mut self, pieces: impl Iterator<Item = &'b Region>) -> Result<Vec<Term>> {
        pieces.filter(|piece| !piece.is_empty()).map(|piece| self.term(piece)).collect()
    }

    /// A box as a term of the first level. Without a dimension that is cut it has one of its own, of one element.
    fn term(&mut self, piece: &Region) -> Result<Term> {
        let sides = |dim: usize| {
            let (lo, size) = piece.offsets.get(dim).zip(piece.sizes.get(dim)).unwrap_or((&0, &1));
            (*lo, lo + size)
        };
        let mut rest = 0;
        for (&dim, table) in self.cut.iter().skip(1).zip(&mut self.tables).rev() {
            let (lo, hi) = sides(dim);
            rest = table.number((lo, hi, rest))?;
        }
        let (lo, hi) = self.cut.first().map_or((0, 1), |&dim| sides(dim));
        Ok(Term { lo, hi, rest, weight: 1 })
    }

    /// The first place, its coordinates innermost first, where the terms do not add up to zero, and to what they do.
    fn first_fault(&mut self, level: usize, terms: &[Term]) -> Result<Option<(Vec<u64>, i64)>> {
        let mut events = self.events(terms)?;
        events.sort_unstable_by_key(|event| (event.at, event.rest));
        let mut left: Vec<(u32, i64)> = Vec::new();
        for group in events.chunk_by(|a, b| a.at == b.at) {
            left.clear();
            for equal in group.chunk_by(|a, b| a.rest == b.rest) {
                let weight: i64 = equal.iter().map(|event| event.weight).sum();
                if let (Some(event), true) = (equal.first(), weight != 0) {
                    left.push((event.rest, weight));
                }
            }
            if left.is_empty() {
                continue;
            }
            let at = group.first().map_or(0, |event| event.at);
            let fault = match self.tables.get(level) {
                None => Some((Vec::new(), left.iter().map(|&(_, weight)| weight).sum())),
                Some(table) => {
                    let terms = left.iter().filter_map(|&(rest, weight)| {
                        let &(lo, hi, rest) = table.sides.get(rest as usize)?;
                        Some(Term { lo, hi, rest, weight })
                    });
                    let terms: Vec<Term> = terms.collect();
                    self.first_fault(level + 1, &terms)?
                }
            };
            if let Some((mut point, excess)) = fault {
                point.push(at);
                return Ok(Some((point, excess)));
            }
        }
        Ok(None)
    }

    fn events(&mut self, terms: &[Term]) -> Result<Vec<Event>> {
        self.events = self.events.saturating_add(2 * terms.len());
        if self.events > MAX_EVENTS {
            let what = format!("pieces are cut too irregularly to check: over {MAX_EVENTS} edges");
            return Err(Error::new(Code::Unsupported, what));
        }
        let mut events = Vec::with_capacity(2 * terms.len());
        for &Term { lo, hi, rest, weight } in terms {
            events.push(Event { at: lo, rest, weight });
            events.push(Event { at: hi, rest, weight: -weight });
        }
        Ok(events)
    }
}

/// The error for an element that no piece holds.
fn hole<'a>(shape: &[u64], at: &[u64], pieces: impl Iterator<Item = &'a Region> + Clone) -> Error {
    let mut free = Region { offsets: at.to_vec(), sizes: vec![1; at.len()] };
    for dim in (0..shape.len()).rev() {
        let Some((&start, &side)) = at.get(dim).zip(shape.get(dim)) else { continue };
        set(&mut free.sizes, dim, side - start);
        // As far as the first piece that it would run into.
        let met = pieces.clone().filter_map(|piece| free.intersect(piece));
        let end = met.filter_map(|shared| shared.offsets.get(dim).copied()).min().unwrap_or(side);
        set(&mut free.sizes, dim, end - start);
    }
    let what = format!("no piece covers {free} of the tensor {}", ShowShape(shape));
    Error::new(Code::Hole, what)
}

fn set(sizes: &mut [u64], dim: usize, value: u64) {
    if let Some(size) = sizes.get_mut(dim) {
        *size = value;
    }
}

/// The error for an element that two pieces hold.
fn overlap<'a>(
    shape: &[u64],
    at: &[u64],
    pieces: impl Iterator<Item = &'a Region>,
    repeats: Repeats,
) -> Error {
    let element = Region { offsets: at.to_vec(), sizes: vec![1; at.len()] };
    let mut holders = pieces.enumerate().filter(|(_, piece)| piece.contains(&element));
    let first = holders.next();
    let differs = |piece: &Region| {
        repeats == Repeats::Overlap || first.is_some_and(|(_, first)| first != piece)
    };
    let second = holders.find(|(_, piece)| differs(piece));
    let shape = ShowShape(shape);
    let what = match (first, second) {
        (Some((a, one)), Some((b, other))) => {
            format!("pieces {a} {one} and {b} {other} of the tensor {shape} overlap")
        }
        _ => format!("two pieces hold {element} of the tensor {shape}"),
    };
    Error::new(Code::Overlap, what)
}
