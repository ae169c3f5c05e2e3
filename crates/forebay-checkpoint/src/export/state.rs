//! The nested state that flat names stand for: dicts and lists, put together from the ways to their values.
//!
//! Keys of dicts are text, as checkpoints have them, but for the states of optimizers: see [`super::counted`].

use std::collections::{HashMap, HashSet};

use forebay_error::{Code, Error, Result};

use super::{counted, pickle};
use crate::model::PathStep;

/// How deep the state may be nested.
const MAX_DEPTH: usize = 256;
/// The longest list: a place in a list is a number in a file, and all before it are made.
const MAX_LIST: u64 = 1 << 20;

/// The most bytes of the pickle of a state. Torch reads it as a whole.
pub(super) const MAX_PICKLE_BYTES: usize = 256 << 20;

/// The state. Memory: no more than twice [`MAX_PICKLE_BYTES`], and some hundred bytes for each step of a way.
#[derive(Default)]
pub(super) struct State {
    root: Node,
    /// Bytes of all values.
    bytes: usize,
}

/// A dict, a list, or a value by its opcodes.
#[derive(Default)]
struct Node {
    children: Vec<(PathStep, Node)>,
    /// Places in `children`.
    places: HashMap<PathStep, usize>,
    value: Option<Vec<u8>>,
}

impl State {
    /// Puts a value where its way leads.
    ///
    /// Errors: `structure_mismatch` where two values would be at one place or one inside of the other; `unsupported`
    /// for a way that is too long, or a list, or where all values together are.
    pub(super) fn put(&mut self, path: &[PathStep], value: Vec<u8>) -> Result<()> {
        if path.len() > MAX_DEPTH {
            return Err(Error::new(Code::Unsupported, "the state is nested too deep"));
        }
        self.bytes = self.bytes.saturating_add(value.len());
        if self.bytes > MAX_PICKLE_BYTES {
            return Err(too_much());
        }
        let mut at = &mut self.root;
        for step in path {
            if at.value.is_some() {
                return Err(twice(path));
            }
            if let PathStep::Index(index) = step
                && *index >= MAX_LIST
            {
                return Err(Error::new(Code::Unsupported, format!("a list of {index} values")));
            }
            let place = match at.places.get(step) {
                Some(&place) => place,
                None => {
                    at.places.insert(step.clone(), at.children.len());
                    at.children.push((step.clone(), Node::default()));
                    at.children.len() - 1
                }
            };
            let next = at.children.get_mut(place).map(|(_, child)| child);
            at = next.ok_or_else(|| Error::new(Code::Internal, "a place without a child"))?;
        }
        if at.value.is_some() || !at.children.is_empty() {
            return Err(twice(path));
        }
        at.value = Some(value);
        Ok(())
    }

    /// Appends its opcodes. What a list lacks is None, as torch has it.
    ///
    /// Errors: `unsupported` as soon as there are too many.
    pub(super) fn write(&self, out: &mut Vec<u8>) -> Result<()> {
        self.root.write(out)
    }
}

impl Node {
    fn write(&self, out: &mut Vec<u8>) -> Result<()> {
        check_len(out)?;
        if let Some(value) = &self.value {
            out.extend_from_slice(value);
            return check_len(out);
        }
        let is_index = |(step, _): &(PathStep, Node)| matches!(step, PathStep::Index(_));
        if !self.children.is_empty() && self.children.iter().all(is_index) {
            return self.write_list(out);
        }
        out.extend_from_slice(&[pickle::EMPTY_DICT, pickle::MARK]);
        for (step, child) in &self.children {
            match step {
                PathStep::Key(key) => pickle::text(out, key),
                PathStep::Index(index) => pickle::int(out, *index as i64),
            }
            match self.numbers_below(step, child) {
                Some(numbers) => child.write_counted(&numbers, out)?,
                None => child.write(out)?,
            }
        }
        out.push(pickle::SETITEMS);
        Ok(())
    }

    /// The keys of a child as numbers, where that is what an optimizer, whose state this is, has of its parameters.
    fn numbers_below(&self, step: &PathStep, child: &Node) -> Option<Vec<i64>> {
        let is_state = matches!(step, PathStep::Key(key) if key == "state");
        if !is_state || child.value.is_some() {
            return None;
        }
        let numbers: Option<Vec<i64>> =
            child.children.iter().map(|(step, _)| counted::number(step)).collect();
        let distinct: Option<HashSet<i64>> =
            numbers.as_ref().map(|all| all.iter().copied().collect());
        let same = numbers.filter(|all| distinct.is_some_and(|few| few.len() == all.len()));
        same.filter(|_| self.has_counted_groups())
    }

    /// Whether it has groups of parameters by number beside it.
    fn has_counted_groups(&self) -> bool {
        let Some(groups) = self.child("param_groups") else { return false };
        if let Some(value) = &groups.value {
            return counted::is_groups(value);
        }
        let is_counted = |(_, group): &(PathStep, Node)| {
            let params = group.child("params").and_then(|params| params.value.as_deref());
            params.is_some_and(counted::is_numbers)
        };
        !groups.children.is_empty() && groups.children.iter().all(is_counted)
    }

    fn child(&self, key: &str) -> Option<&Node> {
        let place = self.places.get(&PathStep::Key(key.to_owned()))?;
        self.children.get(*place).map(|(_, child)| child)
    }

    /// A dict with numbers for its keys.
    fn write_counted(&self, numbers: &[i64], out: &mut Vec<u8>) -> Result<()> {
        out.extend_from_slice(&[pickle::EMPTY_DICT, pickle::MARK]);
        for (&number, (_, child)) in numbers.iter().zip(&self.children) {
            pickle::int(out, number);
            child.write(out)?;
        }
        out.push(pickle::SETITEMS);
        check_len(out)
    }

    fn write_list(&self, out: &mut Vec<u8>) -> Result<()> {
        let place = |(step, _): &&(PathStep, Node)| match step {
            PathStep::Index(index) => *index,
            PathStep::Key(_) => 0,
        };
        let mut children: Vec<&(PathStep, Node)> = self.children.iter().collect();
        children.sort_by_key(place);
        out.extend_from_slice(&[pickle::EMPTY_LIST, pickle::MARK]);
        let mut next = 0;
        for child in children {
            // Below the longest list, so that one gap is a mebibyte at the most.
            let gap = place(&child).saturating_sub(next);
            out.resize(out.len() + gap as usize, pickle::NONE);
            child.1.write(out)?;
            next += gap + 1;
        }
        out.push(pickle::APPENDS);
        check_len(out)
    }
}

fn check_len(out: &[u8]) -> Result<()> {
    if out.len() <= MAX_PICKLE_BYTES { Ok(()) } else { Err(too_much()) }
}

fn too_much() -> Error {
    let what = "the names and objects are too much for one file of torch";
    Error::new(Code::Unsupported, what).hint("export to safetensors")
}

fn twice(path: &[PathStep]) -> Error {
    let shown: Vec<String> = path
        .iter()
        .map(|step| match step {
            PathStep::Key(key) => format!("{key:?}"),
            PathStep::Index(index) => index.to_string(),
        })
        .collect();
    let what = format!("two values of the state would be at [{}]", shown.join(", "));
    Error::new(Code::StructureMismatch, what).hint("write names as they are: `--flat`")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(text: &str) -> PathStep {
        PathStep::Key(text.to_owned())
    }

    #[test]
    fn ways_become_dicts_and_lists() {
        let mut state = State::default();
        let list = |place| [key("a"), PathStep::Index(place)];
        state.put(&list(2), b"K\x02".to_vec()).unwrap();
        state.put(&list(0), b"K\x00".to_vec()).unwrap();
        state.put(&[key("b")], b"N".to_vec()).unwrap();
        let mut out = Vec::new();
        state.write(&mut out).unwrap();
        let wanted = b"}(X\x01\0\0\0a](K\x00NK\x02eX\x01\0\0\0bNu";
        assert_eq!(out, wanted);
        for bad in [&[key("b")][..], &[key("b"), key("c")], &[key("a")], &list(1 << 20)] {
            assert!(state.put(bad, b"N".to_vec()).is_err(), "{bad:?}");
        }
        assert!(state.put(&vec![key("x"); 300], Vec::new()).is_err());
    }

    #[test]
    fn states_of_optimizers_have_numbers_for_keys() {
        let written = |key_text: &str, params: &[u8]| {
            let mut state = State::default();
            state.put(&[key("state"), key(key_text), key("m")], b"N".to_vec()).unwrap();
            let group = [key("param_groups"), PathStep::Index(0), key("params")];
            state.put(&group, params.to_vec()).unwrap();
            let mut out = Vec::new();
            state.write(&mut out).unwrap();
            out
        };
        let has = |out: &[u8], part: &[u8]| out.windows(part.len()).any(|found| found == part);
        let (numbers, names) = (b"](K\x07e", b"](X\x01\0\0\x007e");
        assert!(has(&written("7", numbers), b"}(K\x07}("));
        assert!(has(&written("7", names), b"}(X\x01\0\0\x007}("));
        assert!(has(&written("07", numbers), b"}(X\x02\0\0\x0007}("));
    }

    #[test]
    fn lists_of_nothing_are_no_way_to_fill_memory() {
        let mut state = State::default();
        for name in 0..400 {
            let path = [key(&name.to_string()), PathStep::Index(MAX_LIST - 1)];
            state.put(&path, b"N".to_vec()).unwrap();
        }
        let mut out = Vec::new();
        assert_eq!(state.write(&mut out).unwrap_err().code(), Code::Unsupported);
        assert!(out.len() <= MAX_PICKLE_BYTES + MAX_LIST as usize + 64, "{}", out.len());
    }

    #[test]
    fn values_are_counted_before_they_are_kept() {
        let mut state = State::default();
        let mut put = |name: &str| state.put(&[key(name)], vec![0; MAX_PICKLE_BYTES / 2]);
        put("a").unwrap();
        put("b").unwrap();
        assert_eq!(put("c").unwrap_err().code(), Code::Unsupported);
    }
}
