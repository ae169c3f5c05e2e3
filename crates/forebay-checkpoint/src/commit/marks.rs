//! Pins and holds: what people say must stay, kept with the checkpoints themselves, so that whoever removes steps sees
//! it: this process, another job's retention, `forebay ckpt prune`, an agent on another node.
//!
//! ```text
//! .forebay/pins/<NAME>     a name for a step (Pin)
//! .forebay/holds/<STEP>    the step must not be removed or replaced (Hold); the number is in the key, so that a record
//!                          that is damaged still holds
//! ```
//!
//! A pin keeps a step from retention; removing the name ends that. A hold is stronger: a step that is held cannot be
//! replaced by another save either. Neither hides a step from anybody who deletes files by hand.
//!
//! A mark that is made while somebody removes the step either keeps it or fails: a remover announces itself before it
//! reads the marks for the last time, and a mark is written before its maker looks for announcements
//! ([`super::keep`]).
//!
//! A record that cannot be read protects something that is not known, so nothing is removed until it is looked at.

use std::collections::BTreeSet;

use forebay_error::{Code, Error, Result};
use serde::{Deserialize, Serialize};

use super::aside::let_removers_pass;
use super::names::{Layout, step_of_folder};
use super::record::encode;
use super::root::{RECORD_BYTES_MAX, Root};

/// The folder of pins, of the checkpoint root.
const PINS: &str = ".forebay/pins/";
/// The folder of holds.
const HOLDS: &str = ".forebay/holds/";
/// Most bytes of a pin's name.
pub const PIN_NAME_BYTES_MAX: usize = 100;
/// Most of each.
const MARKS_MAX: usize = 10_000;

/// A name for a step.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pin {
    /// Letters, digits, `.`, `-` and `_`; not first a dot.
    pub name: String,
    /// The step that it keeps.
    pub step: u64,
    /// Who gave it.
    pub who: String,
    /// When, by that host's clock: seconds since 1970.
    pub unix: u64,
}

/// A step that must not be removed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hold {
    /// Which.
    pub step: u64,
    /// Who said so.
    pub who: String,
    /// When, by that host's clock: seconds since 1970.
    pub unix: u64,
    /// Why, for people.
    pub why: Option<String>,
}

/// All of a root.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Marks {
    /// In the order of their names.
    pub pins: Vec<Pin>,
    /// Steps that are held.
    pub holds: BTreeSet<u64>,
}

impl Marks {
    /// Reads them. Errors: I/O; those of a damaged pin.
    pub fn read(root: &Root) -> Result<Self> {
        let mut marks = Self { holds: holds(root)?, ..Self::default() };
        for name in names(root, PINS)? {
            let key = format!("{PINS}{name}");
            match root.read::<Pin>(&key) {
                Ok(Some(pin)) if pin.name == name => marks.pins.push(pin),
                // Removed since it was listed.
                Ok(None) if root.store.get(&key, RECORD_BYTES_MAX)?.is_none() => {}
                Ok(_) => return Err(unreadable(root, &key, None)),
                Err(error) if super::census::is_damage(&error) => {
                    return Err(unreadable(root, &key, Some(error)));
                }
                Err(error) => return Err(error),
            }
        }
        Ok(marks)
    }

    /// Steps that retention leaves alone.
    pub fn kept(&self) -> BTreeSet<u64> {
        self.pins.iter().map(|pin| pin.step).chain(self.holds.iter().copied()).collect()
    }

    /// Gives a step a name, durably. One that was another step's is moved. Waits for a remover that has announced
    /// itself, half a minute at the most.
    ///
    /// Errors: `usage` for what is no name; `not_found` where the step was removed meanwhile: then nothing is changed;
    /// I/O.
    pub fn pin(root: &Root, pin: &Pin) -> Result<()> {
        let key = pin_key(&pin.name)?;
        make(root, &key, &encode(pin, &[])?, pin.step)
    }

    /// Takes a name away; whether it was there.
    pub fn unpin(root: &Root, name: &str) -> Result<bool> {
        root.store.remove(&pin_key(name)?)
    }

    /// Holds a step, durably. Waits and fails as [`pin`](Self::pin) does.
    pub fn hold(root: &Root, hold: &Hold) -> Result<()> {
        make(root, &hold_key(hold.step), &encode(hold, &[])?, hold.step)
    }

    /// Ends a hold; whether there was one.
    pub fn release(root: &Root, step: u64) -> Result<bool> {
        root.store.remove(&hold_key(step))
    }

    /// As [`check_unheld`](Self::check_unheld), where a step is to be replaced. A root that is itself a step's folder
    /// has no holds: those are in the folder above.
    pub(crate) fn check_replaceable(root: &Root, layout: &Layout, step: u64) -> Result<()> {
        Self::check_unheld(root, step)?;
        if !layout.prefix().is_empty() {
            return Ok(());
        }
        let (above, name) = match root.store.above() {
            Ok(Some(found)) => found,
            Ok(None) => return Ok(()),
            // Who may not look there finds no steps there either: to this job the folder stands alone.
            Err(error) if matches!(error.code(), Code::PermissionDenied | Code::NotFound) => {
                tracing::debug!(%error, "holds of the folder above are not looked at");
                return Ok(());
            }
            Err(error) => return Err(error),
        };
        let Some(step) = step_of_folder(&name) else { return Ok(()) };
        Self::check_unheld(&Root { store: above, ..root.clone() }, step)
    }

    /// Fails where a step is held: `already_exists`, because what is there must stay.
    pub(crate) fn check_unheld(root: &Root, step: u64) -> Result<()> {
        let key = hold_key(step);
        if root.store.get(&key, RECORD_BYTES_MAX)?.is_none() {
            return Ok(());
        }
        let what = format!("step {step} is held: it may be neither removed nor replaced");
        let error = Error::new(Code::AlreadyExists, what).at(root.place(&key));
        Err(error.hint("`forebay tier release` ends the hold"))
    }
}

/// Writes a mark of a step, and takes it back if the step goes all the same.
fn make(root: &Root, key: &str, bytes: &[u8], step: u64) -> Result<()> {
    let layout = Layout::of_step(step);
    let attempt = match root.committed(&layout) {
        Ok(attempt) => attempt.flatten(),
        // What cannot be read is never removed.
        Err(error) if super::census::is_damage(&error) => None,
        Err(error) => return Err(error),
    };
    let before = root.store.get(key, RECORD_BYTES_MAX)?;
    root.store.put(key, bytes)?;
    let Some(attempt) = attempt else { return Ok(()) };
    let_removers_pass(root, &layout, attempt)?;
    if root.open_metadata(&layout)?.is_some() {
        return Ok(());
    }
    match before {
        Some((bytes, _)) => root.store.put(key, &bytes)?,
        None => root.store.remove(key).map(drop)?,
    }
    let what = format!("step {step} was removed while it was to be marked; nothing keeps it");
    Err(Error::new(Code::NotFound, what).at(root.place(&layout.metadata())))
}

fn hold_key(step: u64) -> String {
    format!("{HOLDS}{step}")
}

fn pin_key(name: &str) -> Result<String> {
    let is_word = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_');
    let length = 1..=PIN_NAME_BYTES_MAX;
    if length.contains(&name.len()) && name.chars().all(is_word) && !name.starts_with('.') {
        return Ok(format!("{PINS}{name}"));
    }
    let what = format!("`{}` is no name for a step", name.escape_debug());
    let hint = format!("1 to {PIN_NAME_BYTES_MAX} letters, digits, `.`, `-`, `_`; not first a dot");
    Err(Error::new(Code::Usage, what).hint(hint))
}

/// The steps that are held.
pub(crate) fn holds(root: &Root) -> Result<BTreeSet<u64>> {
    let parse = |name: String| name.parse().ok().filter(|step: &u64| step.to_string() == name);
    Ok(names(root, HOLDS)?.into_iter().filter_map(parse).collect())
}

fn names(root: &Root, prefix: &str) -> Result<Vec<String>> {
    match root.store.names(prefix, MARKS_MAX) {
        Ok(names) => {
            let objects = names.into_iter().filter(|(_, is_folder)| !is_folder);
            let names = objects.map(|(name, _)| name);
            Ok(names.filter(|name| !forebay_store::is_temp(name)).collect())
        }
        Err(error) if error.code() == Code::NotFound => Ok(Vec::new()),
        Err(error) => Err(error),
    }
}

fn unreadable(root: &Root, key: &str, source: Option<Error>) -> Error {
    let what = "a pin cannot be read, so it is not known which step it keeps";
    let error = Error::new(Code::InvalidMetadata, what).at(root.place(key));
    let error = error.hint("nothing is removed here until the name is given again, or taken away");
    match source {
        Some(source) => error.with_source(source),
        None => error,
    }
}
