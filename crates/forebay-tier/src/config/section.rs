//! One table of the file, and the variables and flags that go before it: typed getters that note where each value came
//! from. What nobody asked for is an error in the end, so that a misspelled key is never silently without effect.

use std::collections::{BTreeMap, BTreeSet};
use std::num::NonZeroU64;
use std::path::{Path, PathBuf};
use std::time::Duration;

use forebay_error::{Code, Error, Result};
use forebay_store::local_path;
use serde_json::Value as Json;

use super::near::nearest;
use super::setting::{Provenance, Setting, without_secrets};
use super::value;

/// A value before its type is known.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Raw {
    Text(String),
    Integer(i128),
    Float(f64),
    Bool(bool),
    /// A list, a table, a date: no key has one of these.
    Other(&'static str),
}

/// A key of the file: what is there, and on which line.
#[derive(Clone, Debug)]
pub(super) struct Entry {
    pub(super) raw: Raw,
    pub(super) line: usize,
}

/// What is beside the file, and what has been read.
pub(super) struct Reading<'a> {
    /// What errors call the file.
    pub(super) file: &'a Path,
    pub(super) variables: &'a BTreeMap<String, String>,
    pub(super) flags: &'a BTreeMap<String, String>,
    /// Names of variables and flags that somebody asked for.
    pub(super) asked: BTreeSet<String>,
    pub(super) settings: Vec<Setting>,
}

/// See the module.
pub(super) struct Section<'a, 'b> {
    reading: &'a mut Reading<'b>,
    /// `tiers`, `tier.local`, `tier.local.store`.
    path: String,
    entries: BTreeMap<String, Entry>,
    known: Vec<&'static str>,
}

/// A value that was found, to be read.
struct Found {
    raw: Raw,
    from: Provenance,
    /// What errors say of it.
    place: String,
}

impl<'a, 'b> Section<'a, 'b> {
    pub(super) fn new(
        reading: &'a mut Reading<'b>,
        path: String,
        entries: BTreeMap<String, Entry>,
    ) -> Self {
        Self { reading, path, entries, known: Vec::new() }
    }

    fn find(&mut self, key: &'static str) -> Option<Found> {
        self.known.push(key);
        let full = format!("{}.{key}", self.path);
        let variable = variable_of(&full);
        self.reading.asked.extend([full.clone(), variable.clone()]);
        let entry = self.entries.remove(key);
        if let Some(text) = self.reading.flags.get(&full) {
            let (raw, from) = (Raw::Text(text.clone()), Provenance::Flag);
            return Some(Found { raw, from, place: format!("{full} of the command line") });
        }
        if let Some(text) = self.reading.variables.get(&variable) {
            let (raw, from) =
                (Raw::Text(text.clone()), Provenance::Variable { name: variable.clone() });
            return Some(Found { raw, from, place: format!("variable {variable}") });
        }
        let Entry { raw, line } = entry?;
        let file = self.reading.file.to_owned();
        let place = format!("{}:{line}, {full}", file.display());
        Some(Found { raw, from: Provenance::File { file, line }, place })
    }

    fn note(&mut self, key: &str, value: Json, from: Provenance) {
        let key = format!("{}.{key}", self.path);
        self.reading.settings.push(Setting { key, value, from });
    }

    /// Reads a value by `parse`, which gets text; numbers and booleans as text, too.
    fn read<T>(
        &mut self,
        key: &'static str,
        default: Json,
        parse: impl FnOnce(&str, &Provenance) -> std::result::Result<T, String>,
        shown: impl FnOnce(&T) -> Json,
    ) -> Result<Option<T>> {
        let Some(found) = self.find(key) else {
            self.note(key, default, Provenance::Default);
            return Ok(None);
        };
        let text = match &found.raw {
            Raw::Text(text) => text.clone(),
            Raw::Integer(number) => number.to_string(),
            Raw::Float(number) => number.to_string(),
            Raw::Bool(value) => value.to_string(),
            Raw::Other(kind) => {
                let what = format!("`{key}` is {kind}, and must be text, a number or a boolean");
                return Err(Error::new(Code::Usage, what).at(found.place));
            }
        };
        let value = parse(&text, &found.from).map_err(|why| {
            let what = format!("`{key}` is {why}");
            Error::new(Code::Usage, what).at(found.place)
        })?;
        self.note(key, shown(&value), found.from);
        Ok(Some(value))
    }

    pub(super) fn text(&mut self, key: &'static str) -> Result<Option<String>> {
        let parse = |text: &str, _: &Provenance| match text.is_empty() {
            true => Err("empty".to_owned()),
            false => Ok(text.to_owned()),
        };
        self.read(key, Json::Null, parse, |text| without_secrets(text).into())
    }

    /// A value of a few words, or whatever `parse` takes.
    pub(super) fn word<T>(
        &mut self,
        key: &'static str,
        default: &str,
        parse: impl FnOnce(&str) -> std::result::Result<T, String>,
    ) -> Result<Option<T>> {
        let mut said = String::new();
        let parse = |text: &str, _: &Provenance| {
            said = text.trim().to_owned();
            parse(text)
        };
        let value = self.read(key, default.into(), parse, |_| Json::Null)?;
        if value.is_some()
            && let Some(setting) = self.reading.settings.last_mut()
        {
            setting.value = said.into();
        }
        Ok(value)
    }

    pub(super) fn size(&mut self, key: &'static str, default: Option<u64>) -> Result<Option<u64>> {
        self.read(key, default.into(), |text, _| value::size(text), |bytes| (*bytes).into())
    }

    pub(super) fn rate(&mut self, key: &'static str) -> Result<Option<NonZeroU64>> {
        self.read(key, Json::Null, |text, _| value::rate(text), |rate| rate.get().into())
    }

    pub(super) fn time(
        &mut self,
        key: &'static str,
        default: Option<Duration>,
    ) -> Result<Option<Duration>> {
        let seconds = |time: &Duration| Json::from(time.as_secs_f64());
        let default = default.as_ref().map_or(Json::Null, seconds);
        self.read(key, default, |text, _| value::time(text), seconds)
    }

    /// A whole number from a range.
    pub(super) fn number(
        &mut self,
        key: &'static str,
        default: Option<u64>,
        range: std::ops::RangeInclusive<u64>,
    ) -> Result<Option<u64>> {
        let parse = |text: &str, _: &Provenance| {
            let number = text.trim().parse().ok().filter(|number| range.contains(number));
            number.ok_or_else(|| {
                format!("not a whole number from {} to {}", range.start(), range.end())
            })
        };
        self.read(key, default.into(), parse, |number| (*number).into())
    }

    pub(super) fn flag(&mut self, key: &'static str, default: Json) -> Result<Option<bool>> {
        let parse = |text: &str, _: &Provenance| match text.trim() {
            "true" => Ok(true),
            "false" => Ok(false),
            _ => Err("neither true nor false".to_owned()),
        };
        self.read(key, default, parse, |value| (*value).into())
    }

    /// A path. In the file it counts from the file's folder, else from the working folder.
    pub(super) fn path(
        &mut self,
        key: &'static str,
        default: Option<&Path>,
    ) -> Result<Option<PathBuf>> {
        let shown = |path: &Path| Json::from(path.display().to_string());
        let default = default.map_or(Json::Null, shown);
        let parse = |text: &str, from: &Provenance| match text.is_empty() {
            true => Err("empty".to_owned()),
            false => Ok(resolve(text, from)),
        };
        self.read(key, default, parse, |path: &PathBuf| shown(path))
    }

    /// A path or a URL; paths as in [`path`](Self::path).
    pub(super) fn place(&mut self, key: &'static str) -> Result<Option<String>> {
        let parse = |text: &str, from: &Provenance| {
            let is_url =
                text.contains("://") || text.starts_with("memory:") || text.starts_with("file:");
            match (text.is_empty(), is_url) {
                (true, _) => Err("empty".to_owned()),
                (false, true) => match local_path(text) {
                    Ok(_) => Ok(text.to_owned()),
                    Err(error) => Err(no_place(&error)),
                },
                (false, false) => resolve(text, from)
                    .into_os_string()
                    .into_string()
                    .map_err(|_| "below a folder whose name is not UTF-8".to_owned()),
            }
        };
        self.read(key, Json::Null, parse, |place: &String| without_secrets(place).into())
    }

    /// Fails if there is a key that nobody asked for.
    pub(super) fn finish(self) -> Result<()> {
        let Some((key, entry)) = self.entries.into_iter().next() else { return Ok(()) };
        let place = format!("{}:{}, {}.{key}", self.reading.file.display(), entry.line, self.path);
        let what = format!("`{key}` is no key of [{}]", self.path);
        let error = Error::new(Code::Usage, what).at(place);
        Err(match nearest(&key, self.known.iter().copied()) {
            Some(near) => error.hint(format!("is `{near}` meant?")),
            None => error.hint(format!("its keys are {}", self.known.join(", "))),
        })
    }
}

/// Why a URL is no place, and what would be one.
fn no_place(error: &Error) -> String {
    match error.hints() {
        [] => format!("no place: {}", error.what()),
        hints => format!("no place: {}; {}", error.what(), hints.join("; ")),
    }
}

fn resolve(text: &str, from: &Provenance) -> PathBuf {
    let path = Path::new(text);
    if let Ok(below) = path.strip_prefix("~")
        && let Some(home) = std::env::home_dir()
    {
        return home.join(below);
    }
    match from {
        Provenance::File { file, .. } => file.parent().unwrap_or(Path::new("")).join(path),
        _ => path.to_owned(),
    }
}

/// The variable that stands for a key: `tiers.look_every` is `FOREBAY_TIERS_LOOK_EVERY`.
pub(super) fn variable_of(key: &str) -> String {
    let upper = |c: char| if c.is_ascii_alphanumeric() { c.to_ascii_uppercase() } else { '_' };
    format!("FOREBAY_{}", key.chars().map(upper).collect::<String>())
}
