//! From header text to entries, without an opinion on whether they fit together.
//!
//! The text is walked once by hand-written visitors rather than turned into a tree: a map would swallow repeated
//! names, and a header may hold a million entries. Depth is limited by the JSON library (128), and what is built is
//! bounded by a small multiple of the text.
//!
//! A visitor can only say "error" with a text, so it leaves the code of the fault in [`Trail`] on the way out.

use super::{HeaderTensor, METADATA_KEY};
use crate::text::quoted;
use forebay_error::{Code, Error, Result};
use forebay_tensor::Dtype;
use serde::de::{self, DeserializeSeed, Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};
use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::fmt;

/// What the text says.
pub(super) struct Raw {
    pub(super) metadata: Option<Vec<(String, String)>>,
    /// In the order of the text, names not yet compared.
    pub(super) tensors: Vec<HeaderTensor>,
}

pub(super) fn parse(text: &str) -> Result<Raw> {
    let trail = Trail::default();
    let mut deserializer = serde_json::Deserializer::from_str(text);
    let raw = deserializer.deserialize_map(HeaderVisitor(&trail));
    raw.and_then(|raw| deserializer.end().map(|()| raw)).map_err(|error| trail.error(error))
}

/// Where the walk was and what it met when it failed.
#[derive(Default)]
struct Trail {
    code: Cell<Option<Code>>,
    tensor: RefCell<Option<String>>,
}

impl Trail {
    /// Notes the code of a fault, unless a nearer one was noted.
    fn fault(&self, code: Code) {
        if self.code.get().is_none() {
            self.code.set(Some(code));
        }
    }

    fn fail<E: de::Error>(&self, code: Code, what: String) -> E {
        self.fault(code);
        E::custom(what)
    }

    fn error(self, error: serde_json::Error) -> Error {
        if !error.is_data() {
            return Error::new(Code::InvalidJson, "header is not JSON").with_source(error);
        }
        let code = self.code.get().unwrap_or(Code::NotAnObject);
        let what = match (code, self.tensor.into_inner()) {
            (_, Some(name)) => format!("entry of tensor {}: {error}", quoted(&name)),
            (Code::NotAnObject, _) => format!("header is not a JSON object: {error}"),
            (_, None) => format!("header metadata: {error}"),
        };
        Error::new(code, what)
    }
}

struct HeaderVisitor<'t>(&'t Trail);

impl<'de> Visitor<'de> for HeaderVisitor<'_> {
    type Value = Raw;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Raw, A::Error> {
        let trail = self.0;
        let mut metadata = None;
        let mut tensors = Vec::new();
        while let Some(name) = map.next_key::<String>()? {
            if name == METADATA_KEY {
                if metadata.is_some() {
                    return Err(
                        trail.fail(Code::DuplicateKey, format!("{METADATA_KEY} occurs twice"))
                    );
                }
                let value = map.next_value_seed(MetadataSeed);
                metadata = Some(value.inspect_err(|_| trail.fault(Code::BadMetadata))?);
                continue;
            }
            match map.next_value_seed(EntrySeed(trail)) {
                Ok(Entry { dtype, shape, offsets: (begin, end) }) => {
                    tensors.push(HeaderTensor { name, dtype, shape, begin, end });
                }
                Err(error) => {
                    trail.fault(Code::BadField);
                    trail.tensor.replace(Some(name));
                    return Err(error);
                }
            }
        }
        Ok(Raw { metadata: metadata.flatten(), tensors })
    }
}

/// Null, or a map of text to text.
struct MetadataSeed;

impl<'de> DeserializeSeed<'de> for MetadataSeed {
    type Value = Option<Vec<(String, String)>>;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Self::Value, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for MetadataSeed {
    type Value = Option<Vec<(String, String)>>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a map of text to text")
    }

    fn visit_unit<E>(self) -> Result<Self::Value, E> {
        Ok(None)
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let mut pairs = Vec::new();
        while let Some(pair) = map.next_entry::<String, String>()? {
            pairs.push(pair);
        }
        Ok(Some(last_of_each(pairs)))
    }
}

/// Of several pairs with one key the last value counts, in the place of the first.
fn last_of_each(pairs: Vec<(String, String)>) -> Vec<(String, String)> {
    let mut places: HashMap<String, usize> = HashMap::new();
    let mut kept: Vec<(String, String)> = Vec::new();
    for (key, value) in pairs {
        match places.get(&key).and_then(|&place| kept.get_mut(place)) {
            Some(earlier) => earlier.1 = value,
            None => {
                places.insert(key.clone(), kept.len());
                kept.push((key, value));
            }
        }
    }
    kept
}

struct Entry {
    dtype: Dtype,
    shape: Vec<u64>,
    offsets: (u64, u64),
}

/// `{"dtype": D, "shape": [..], "data_offsets": [b, e], ..}`, or the three values in an array.
struct EntrySeed<'t>(&'t Trail);

impl<'de> DeserializeSeed<'de> for EntrySeed<'_> {
    type Value = Entry;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Entry, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl EntrySeed<'_> {
    fn once<E: de::Error>(&self, seen: bool, field: &str) -> Result<(), E> {
        match seen {
            true => Err(self.0.fail(Code::DuplicateKey, format!("{field} occurs twice"))),
            false => Ok(()),
        }
    }
}

impl<'de> Visitor<'de> for EntrySeed<'_> {
    type Value = Entry;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object with dtype, shape and data_offsets")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Entry, A::Error> {
        let (mut dtype, mut shape, mut offsets) = (None, None, None);
        while let Some(field) = map.next_key_seed(FieldSeed)? {
            match field {
                Field::Dtype => {
                    self.once(dtype.is_some(), "dtype")?;
                    dtype = Some(map.next_value_seed(DtypeSeed(self.0))?);
                }
                Field::Shape => {
                    self.once(shape.is_some(), "shape")?;
                    shape = Some(map.next_value::<Vec<u64>>()?);
                }
                Field::Offsets => {
                    self.once(offsets.is_some(), "data_offsets")?;
                    offsets = Some(map.next_value_seed(PairSeed)?);
                }
                Field::Other => map.next_value_seed(Skip)?,
            }
        }
        Ok(Entry {
            dtype: dtype.ok_or_else(|| de::Error::missing_field("dtype"))?,
            shape: shape.ok_or_else(|| de::Error::missing_field("shape"))?,
            offsets: offsets.ok_or_else(|| de::Error::missing_field("data_offsets"))?,
        })
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Entry, A::Error> {
        let short = |at| move || de::Error::invalid_length(at, &"three values");
        let entry = Entry {
            dtype: seq.next_element_seed(DtypeSeed(self.0))?.ok_or_else(short(0))?,
            shape: seq.next_element()?.ok_or_else(short(1))?,
            offsets: seq.next_element_seed(PairSeed)?.ok_or_else(short(2))?,
        };
        match seq.next_element_seed(Skip)? {
            Some(()) => Err(de::Error::custom("more than three values")),
            None => Ok(entry),
        }
    }
}

enum Field {
    Dtype,
    Shape,
    Offsets,
    Other,
}

struct FieldSeed;

impl<'de> DeserializeSeed<'de> for FieldSeed {
    type Value = Field;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Field, D::Error> {
        deserializer.deserialize_identifier(self)
    }
}

impl Visitor<'_> for FieldSeed {
    type Value = Field;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a name")
    }

    fn visit_str<E>(self, name: &str) -> Result<Field, E> {
        Ok(match name {
            "dtype" => Field::Dtype,
            "shape" => Field::Shape,
            "data_offsets" => Field::Offsets,
            _ => Field::Other,
        })
    }
}

/// `"F32"`, or what the library also takes for it: `{"F32": null}`.
struct DtypeSeed<'t>(&'t Trail);

impl<'de> DeserializeSeed<'de> for DtypeSeed<'_> {
    type Value = Dtype;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Dtype, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for DtypeSeed<'_> {
    type Value = Dtype;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the name of a dtype")
    }

    fn visit_str<E: de::Error>(self, name: &str) -> Result<Dtype, E> {
        Dtype::parse(name).ok_or_else(|| {
            self.0.fail(Code::UnknownDtype, format!("unknown dtype {}", quoted(name)))
        })
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Dtype, A::Error> {
        let Some(name) = map.next_key::<String>()? else {
            return Err(de::Error::custom("dtype is an empty object"));
        };
        let dtype = self.visit_str(&name)?;
        map.next_value_seed(Nothing)?;
        match map.next_key::<IgnoredAny>()? {
            Some(_) => Err(de::Error::custom("dtype is an object of several names")),
            None => Ok(dtype),
        }
    }
}

/// `null`.
struct Nothing;

impl<'de> DeserializeSeed<'de> for Nothing {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Nothing {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("null")
    }

    fn visit_unit<E>(self) -> Result<(), E> {
        Ok(())
    }
}

/// Exactly two numbers.
struct PairSeed;

impl<'de> DeserializeSeed<'de> for PairSeed {
    type Value = (u64, u64);

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(u64, u64), D::Error> {
        deserializer.deserialize_seq(self)
    }
}

impl<'de> Visitor<'de> for PairSeed {
    type Value = (u64, u64);

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("two offsets")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<(u64, u64), A::Error> {
        let begin = seq.next_element()?.ok_or_else(|| de::Error::invalid_length(0, &self))?;
        let end = seq.next_element()?.ok_or_else(|| de::Error::invalid_length(1, &self))?;
        match seq.next_element_seed(Skip)? {
            Some(()) => Err(de::Error::custom("more than two offsets")),
            None => Ok((begin, end)),
        }
    }
}

/// Any value, read as strictly as one that is used: `IgnoredAny` would let through deeper nesting, numbers out of
/// range and broken surrogates, which the library does not.
struct Skip;

impl<'de> DeserializeSeed<'de> for Skip {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Skip {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("any value")
    }

    fn visit_bool<E>(self, _: bool) -> Result<(), E> {
        Ok(())
    }

    fn visit_i64<E>(self, _: i64) -> Result<(), E> {
        Ok(())
    }

    fn visit_u64<E>(self, _: u64) -> Result<(), E> {
        Ok(())
    }

    fn visit_f64<E>(self, _: f64) -> Result<(), E> {
        Ok(())
    }

    fn visit_str<E>(self, _: &str) -> Result<(), E> {
        Ok(())
    }

    fn visit_unit<E>(self) -> Result<(), E> {
        Ok(())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<(), A::Error> {
        while seq.next_element_seed(Skip)?.is_some() {}
        Ok(())
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        while map.next_key_seed(Skip)?.is_some() {
            map.next_value_seed(Skip)?;
        }
        Ok(())
    }
}
