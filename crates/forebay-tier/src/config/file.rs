//! The file: where it is looked for, and its text taken apart.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use forebay_error::{Code, Error, Result};
use toml::de::{DeTable, DeValue};

use super::near::nearest;
use super::section::{Entry, Raw};

/// The variable that names the file.
pub const CONFIG_VARIABLE: &str = "FOREBAY_CONFIG";
/// Most bytes of it.
const BYTES_MAX: u64 = 4 << 20;
/// Most tiers.
pub(super) const TIERS_MAX: usize = 16;

/// Keys of one table.
pub(super) type Entries = BTreeMap<String, Entry>;

/// A `[[tier]]` as it is in the file.
#[derive(Default)]
pub(super) struct TierTable {
    pub(super) line: usize,
    pub(super) entries: Entries,
    pub(super) store: Entries,
}

/// The file, taken apart.
#[derive(Default)]
pub(super) struct Tables {
    pub(super) tiers: Vec<TierTable>,
    pub(super) moving: Entries,
    pub(super) agent: Entries,
}

/// The file that counts: the one that is named, or that `FOREBAY_CONFIG` names, else the first that is there of
/// `./forebay.toml`, `~/.config/forebay/forebay.toml` (or below `XDG_CONFIG_HOME`), `/etc/forebay/forebay.toml`.
///
/// Errors: `not_found` where a file that was named is not there.
pub fn find(named: Option<&Path>) -> Result<Option<PathBuf>> {
    let variable = std::env::var_os(CONFIG_VARIABLE).filter(|value| !value.is_empty());
    let named = named.map(Path::to_owned).or(variable.map(PathBuf::from));
    if let Some(named) = named {
        if named.is_file() {
            return Ok(Some(named));
        }
        return Err(Error::new(Code::NotFound, "no such configuration").at(named.display()));
    }
    let home = std::env::var_os("XDG_CONFIG_HOME").filter(|value| !value.is_empty());
    let home = home.map(PathBuf::from).or(std::env::home_dir().map(|home| home.join(".config")));
    let own = home.map(|home| home.join("forebay/forebay.toml"));
    let system = PathBuf::from("/etc/forebay/forebay.toml");
    let all = [Some(PathBuf::from("forebay.toml")), own, Some(system)];
    Ok(all.into_iter().flatten().find(|path| path.is_file()))
}

/// Reads it.
pub(super) fn read(path: &Path) -> Result<String> {
    let failed = |error| Error::io("cannot read the configuration", error).at(path.display());
    let bytes = std::fs::metadata(path).map_err(failed)?.len();
    if bytes > BYTES_MAX {
        let what = format!("a configuration of {bytes} bytes, {BYTES_MAX} are the most");
        return Err(Error::new(Code::Usage, what).at(path.display()));
    }
    std::fs::read_to_string(path).map_err(failed)
}

/// Takes it apart. Errors: `usage`, naming line and key.
pub(super) fn parse(text: &str, file: &Path) -> Result<Tables> {
    let lines = Lines { text, file };
    let root = DeTable::parse(text).map_err(|error| {
        let at = error.span().map_or(0, |span| span.start);
        Error::new(Code::Usage, format!("not TOML: {}", error.message())).at(lines.place(at))
    })?;
    let mut tables = Tables::default();
    for (key, value) in root.into_inner() {
        let at = key.span().start;
        match (key.get_ref().as_ref(), value.into_inner()) {
            ("tiers", DeValue::Table(table)) => tables.moving = lines.entries(table),
            ("agent", DeValue::Table(table)) => tables.agent = lines.entries(table),
            ("tier", DeValue::Array(array)) => {
                for item in array.into_iter() {
                    let at = item.span().start;
                    let DeValue::Table(table) = item.into_inner() else {
                        return Err(lines.wrong("`tier` is a list of tables", at));
                    };
                    tables.tiers.push(lines.tier(table, at)?);
                }
            }
            ("tier", _) => {
                return Err(lines.wrong("a tier begins with [[tier]], in two brackets", at));
            }
            ("tiers" | "agent", _) => return Err(lines.wrong("this is no table", at)),
            (other, _) => {
                let error = lines.wrong(&format!("`{other}` is no table of a configuration"), at);
                let known = ["tier", "tiers", "agent"];
                return Err(match nearest(other, known.into_iter()) {
                    Some(near) => error.hint(format!("is `{near}` meant?")),
                    None => error.hint("its tables are [[tier]], [tiers] and [agent]"),
                });
            }
        }
    }
    if tables.tiers.len() > TIERS_MAX {
        let what = format!("{} tiers, {TIERS_MAX} are the most", tables.tiers.len());
        return Err(Error::new(Code::Usage, what).at(file.display()));
    }
    Ok(tables)
}

/// Where things are in the text.
struct Lines<'a> {
    text: &'a str,
    file: &'a Path,
}

impl Lines<'_> {
    fn line(&self, at: usize) -> usize {
        let before = self.text.as_bytes().get(..at).unwrap_or_default();
        1 + before.iter().filter(|byte| **byte == b'\n').count()
    }

    fn place(&self, at: usize) -> String {
        format!("{}:{}", self.file.display(), self.line(at))
    }

    fn wrong(&self, what: &str, at: usize) -> Error {
        Error::new(Code::Usage, what).at(self.place(at))
    }

    fn tier(&self, table: DeTable<'_>, at: usize) -> Result<TierTable> {
        let mut tier = TierTable { line: self.line(at), ..TierTable::default() };
        for (key, value) in table {
            let (name, line) = (key.get_ref().clone().into_owned(), self.line(key.span().start));
            match (name.as_str(), value.into_inner()) {
                ("store", DeValue::Table(table)) => tier.store = self.entries(table),
                (_, value) => drop(tier.entries.insert(name, Entry { raw: raw(value), line })),
            }
        }
        Ok(tier)
    }

    fn entries(&self, table: DeTable<'_>) -> Entries {
        let entry = |(key, value): (toml::Spanned<_>, toml::Spanned<DeValue<'_>>)| {
            let line = self.line(key.span().start);
            let key: std::borrow::Cow<'_, str> = key.into_inner();
            (key.into_owned(), Entry { raw: raw(value.into_inner()), line })
        };
        table.into_iter().map(entry).collect()
    }
}

fn raw(value: DeValue<'_>) -> Raw {
    match value {
        DeValue::String(text) => Raw::Text(text.into_owned()),
        DeValue::Integer(integer) => {
            let digits = integer.as_str().replace('_', "");
            match i128::from_str_radix(&digits, integer.radix()) {
                Ok(number) => Raw::Integer(number),
                Err(_) => Raw::Other("a number with too many digits"),
            }
        }
        DeValue::Float(float) => match float.as_str().replace('_', "").parse() {
            Ok(number) => Raw::Float(number),
            Err(_) => Raw::Other("a number that cannot be read"),
        },
        DeValue::Boolean(value) => Raw::Bool(value),
        DeValue::Datetime(_) => Raw::Other("a date"),
        DeValue::Array(_) => Raw::Other("a list"),
        DeValue::Table(_) => Raw::Other("a table"),
    }
}
