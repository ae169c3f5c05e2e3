//! The handle of a node.
//!
//! ```text
//! bits 31..28  tag
//! bits 27..0   small integers: the value, two's complement
//!              constants: which one
//!              others: where the node is in the table of its kind
//! ```

/// A handle into a [`Graph`](super::Graph). Equal handles are the same node; equal nodes may have different handles.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Value(u32);

/// What the upper four bits mean.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Tag {
    Const = 0,
    SmallInt,
    WideInt,
    BigInt,
    Float,
    Text,
    Surrogate,
    Bytes,
    List,
    Tuple,
    Dict,
    Set,
    Global,
    New,
    Call,
    Persistent,
}

const TAG_SHIFT: u32 = 28;
const PAYLOAD: u32 = (1 << TAG_SHIFT) - 1;

impl Value {
    pub(super) const NONE: Value = Value(0);
    pub(super) const FALSE: Value = Value(1);
    pub(super) const TRUE: Value = Value(2);
    pub(super) const EMPTY_TUPLE: Value = Value(3);
    /// A slot of the memo that was never written; never in a graph.
    pub(super) const UNSET: Value = Value(4);

    /// A handle; `None` where the payload does not fit 28 bits.
    pub(super) fn new(tag: Tag, payload: usize) -> Option<Value> {
        let payload = u32::try_from(payload).ok().filter(|payload| *payload <= PAYLOAD)?;
        Some(Value(((tag as u32) << TAG_SHIFT) | payload))
    }

    /// A small integer; `None` where 28 bits do not hold it.
    pub(super) fn small(number: i64) -> Option<Value> {
        const HALF: i64 = 1 << (TAG_SHIFT - 1);
        let fits = (-HALF..HALF).contains(&number);
        // The cut to 32 bits keeps the 28 that count.
        let bits = (number as u32) & PAYLOAD;
        fits.then_some(Value(((Tag::SmallInt as u32) << TAG_SHIFT) | bits))
    }

    pub(super) fn tag(self) -> Tag {
        use Tag::*;
        const TAGS: [Tag; 16] = [
            Const, SmallInt, WideInt, BigInt, Float, Text, Surrogate, Bytes, List, Tuple, Dict,
            Set, Global, New, Call, Persistent,
        ];
        TAGS[(self.0 >> TAG_SHIFT) as usize]
    }

    pub(super) fn payload(self) -> usize {
        (self.0 & PAYLOAD) as usize
    }

    /// The number of a small integer.
    pub(super) fn small_int(self) -> i64 {
        i64::from(((self.0 << (32 - TAG_SHIFT)) as i32) >> (32 - TAG_SHIFT))
    }

    pub(super) fn from_word(word: u32) -> Value {
        Value(word)
    }

    pub(super) fn word(self) -> u32 {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tags_and_payloads_come_back() {
        for tag in 0..16_u32 {
            let value = Value::from_word((tag << 28) | 77);
            assert_eq!(value.tag() as u32, tag);
            assert_eq!(Value::new(value.tag(), 77), Some(value));
        }
        assert_eq!(Value::new(Tag::List, 1 << 28), None);
    }

    #[test]
    fn small_integers_keep_their_sign() {
        for number in [0, 1, -1, (1 << 27) - 1, -(1 << 27)] {
            assert_eq!(Value::small(number).unwrap().small_int(), number);
        }
        assert_eq!(Value::small(1 << 27), None);
        assert_eq!(Value::small(-(1 << 27) - 1), None);
    }
}
