//! The nested state that flat names stand for: dicts and lists, put together from the ways to their values.

use std::collections::HashMap;

use forebay_error::{Code, Error, Result};

use super::pickle;
use crate::model::PathStep;

/// How deep the state may be nested.
const MAX_DEPTH: usize = 256;
/// The longest list: a place in a list is a number in a file, and all before it are made.
const MAX_LIST: u64 = 1 << 20;

/// A dict, a list, or a value by its opcodes.
#[derive(Default)]
pub(super) struct State {
    children: Vec<(PathStep, State)>,
    /// Places in `children`.
    places: HashMap<PathStep, usize>,
    value: Option<Vec<u8>>,
}

impl State {
    /// Puts a value where its way leads.
    ///
    /// Errors: `structure_mismatch` where two values would be at one place or one inside of the other; `unsupported`
    /// for a way that is too long, or a list.
    pub(super) fn put(&mut self, path: &[PathStep], value: Vec<u8>) -> Result<()> {
        if path.len() > MAX_DEPTH {
            return Err(Error::new(Code::Unsupported, "the state is nested too deep"));
        }
        let mut at = self;
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
                    at.children.push((step.clone(), State::default()));
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
    pub(super) fn write(&self, out: &mut Vec<u8>) {
        if let Some(value) = &self.value {
            return out.extend_from_slice(value);
        }
        let is_index = |(step, _): &(PathStep, State)| matches!(step, PathStep::Index(_));
        if !self.children.is_empty() && self.children.iter().all(is_index) {
            return self.write_list(out);
        }
        out.extend_from_slice(&[pickle::EMPTY_DICT, pickle::MARK]);
        for (step, child) in &self.children {
            match step {
                PathStep::Key(key) => pickle::text(out, key),
                PathStep::Index(index) => pickle::int(out, *index as i64),
            }
            child.write(out);
        }
        out.push(pickle::SETITEMS);
    }

    fn write_list(&self, out: &mut Vec<u8>) {
        let index = |step: &PathStep| match step {
            PathStep::Index(index) => *index,
            PathStep::Key(_) => 0,
        };
        let len = self.children.iter().map(|(step, _)| index(step) + 1).max().unwrap_or(0);
        out.extend_from_slice(&[pickle::EMPTY_LIST, pickle::MARK]);
        for place in 0..len {
            let child = self.places.get(&PathStep::Index(place));
            match child.and_then(|&child| self.children.get(child)) {
                Some((_, child)) => child.write(out),
                None => out.push(pickle::NONE),
            }
        }
        out.push(pickle::APPENDS);
    }
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
        state.write(&mut out);
        let wanted = b"}(X\x01\0\0\0a](K\x00NK\x02eX\x01\0\0\0bNu";
        assert_eq!(out, wanted);
        for bad in [&[key("b")][..], &[key("b"), key("c")], &[key("a")], &list(1 << 20)] {
            assert!(state.put(bad, b"N".to_vec()).is_err(), "{bad:?}");
        }
        assert!(state.put(&vec![key("x"); 300], Vec::new()).is_err());
    }
}
