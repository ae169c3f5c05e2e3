//! Keys of states of optimizers: numbers again, as their `load_state_dict` looks for them.
//!
//! Checkpoints keep keys of dicts as text. An optimizer of torch counts its parameters, and would pass over a state
//! under "0" without a word. What its groups hold says which it is: numbers, or, from `get_state_dict`, names.

use forebay_format::pickle::{Graph, Options, Value, parse};

use super::pickle::{PROTO_2, STOP};
use crate::model::PathStep;

/// Whether a value is the parameters of a group, by their numbers.
pub(super) fn is_numbers(opcodes: &[u8]) -> bool {
    in_value(opcodes, numbers)
}

/// Whether a value is groups that hold their parameters by number: torch before 2.4 stored such a list as one value.
pub(super) fn is_groups(opcodes: &[u8]) -> bool {
    in_value(opcodes, |graph, value| {
        let Some(mut groups) = graph.as_sequence(value) else { return false };
        groups.all(|group| graph.get(group, "params").is_some_and(|found| numbers(graph, found)))
    })
}

/// The number that a key of a dict was, if it can have been one: the text of it is as Python writes it.
pub(super) fn number(step: &PathStep) -> Option<i64> {
    match step {
        PathStep::Key(text) => {
            let number = text.parse().ok().filter(|&number: &i64| number >= 0)?;
            (number.to_string() == *text).then_some(number)
        }
        PathStep::Index(index) => i64::try_from(*index).ok(),
    }
}

fn in_value(opcodes: &[u8], holds: impl Fn(&Graph<'_>, Value) -> bool) -> bool {
    let pickle = [&PROTO_2, opcodes, &[STOP]].concat();
    parse(&pickle, &Options::ITEM).is_ok_and(|graph| holds(&graph, graph.root()))
}

fn numbers(graph: &Graph<'_>, value: Value) -> bool {
    let items = graph.as_sequence(value);
    items.is_some_and(|mut items| items.all(|item| graph.as_i64(item).is_some()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_and_names_are_told_apart() {
        assert!(is_numbers(b"](K\x00J\x00\x00\x01\x00e"));
        assert!(is_numbers(b"](e"));
        assert!(!is_numbers(b"](K\x00X\x01\0\0\0we"));
        assert!(!is_numbers(b"N"));
        assert!(!is_numbers(b"]("));
        let group = |params: &[u8]| [b"](}(X\x06\0\0\0params", params, b"ue"].concat();
        assert!(is_groups(&group(b"](K\x00e")));
        assert!(!is_groups(&group(b"](X\x01\0\0\0we")));
        assert!(!is_groups(b"](K\x00e"));
    }

    #[test]
    fn only_what_python_writes_is_a_number() {
        let number = |text: &str| number(&PathStep::Key(text.to_owned()));
        assert_eq!(number("0"), Some(0));
        assert_eq!(number("120"), Some(120));
        for text in ["", "-1", "+1", "01", "1.weight", " 1", "99999999999999999999"] {
            assert_eq!(number(text), None, "{text:?}");
        }
    }
}
