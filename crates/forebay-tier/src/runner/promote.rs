//! Promotion: a step becomes a folder with a name, which no rule removes: a golden model.
//!
//! It is an ordinary hop, with all of its checks, to a store that puts what belongs to the step and to the root into
//! the folder of that name ([`Inside`]): so the folder is a checkpoint by itself, committed in one step, that verifies,
//! loads and exports as any other. A second call with the same name goes on with the first, or finds it done; another
//! step under a name that is taken is refused.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use forebay_checkpoint::commit::{METADATA, Root, step_folder, step_of_folder};
use forebay_checkpoint::export::{Aliases, Format, Options, export};
use forebay_checkpoint::progress::Unwatched;
use forebay_checkpoint::save::OurMetadata;
use forebay_error::{Code, Error, Result};
use forebay_store::{PosixStore, Store, StoreSettings, open_store};

use super::action::Outcome;
use super::inside::Inside;
use super::state::{Moving, Shared, Watch};
use super::tiers::folder_of;
use crate::audit_log::Event;
use crate::hop::{HopOptions, HopReport, Side, hop};
use crate::limits::{Caps, Limits, Priority};
use crate::policy::Order;

/// Bytes of tensors in one file of an export, as everybody has them.
const SHARD_BYTES: u64 = 5_000_000_000;

/// What is asked for.
pub(super) struct Promotion<'a> {
    pub(super) step: u64,
    pub(super) name: &'a str,
    pub(super) to: Option<&'a str>,
    pub(super) export: bool,
    pub(super) who: &'a str,
}

/// Where the folder is made.
struct Destination {
    store: Arc<dyn Store>,
    limits: Arc<Limits>,
    /// The tier, where it is one.
    tier: Option<usize>,
    /// On this machine, where it is a folder.
    folder: Option<PathBuf>,
}

/// Copies the step to a folder of that name, and exports it if that is asked for.
pub(super) fn promote(shared: &Shared, promotion: &Promotion<'_>) -> Result<Outcome> {
    check_name(promotion.name)?;
    let destination = Destination::find(shared, promotion.to)?;
    if promotion.export && destination.folder.is_none() {
        let what = "safetensors are written to folders of this machine";
        let error = Error::new(Code::Unsupported, what);
        return Err(error.hint("promote to a folder, or use `forebay ckpt export`"));
    }
    if let Some(folder) = &destination.folder {
        check_unexported(folder, promotion.name)?;
    }
    let (from, report) = copy(shared, promotion, &destination)?;
    log(shared, promotion, from, &report, &destination);
    let place = format!("{}/{}", destination.store.name(), promotion.name);
    let mut outcome = Outcome::of(format!("step {} is {place}", promotion.step));
    if let Some(folder) = destination.folder.filter(|_| promotion.export) {
        outcome.notes.push(export_to(&folder, promotion.name)?);
    }
    Ok(outcome)
}

/// Names that are of steps, or of records, are not for people.
fn check_name(name: &str) -> Result<()> {
    let is_word = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_');
    let fits = (1..=100).contains(&name.len()) && name.chars().all(is_word);
    if fits && !name.starts_with('.') && step_of_folder(name).is_none() {
        return Ok(());
    }
    let what = format!("`{}` is no name for a folder of a step", name.escape_debug());
    let hint = "1 to 100 letters, digits, `.`, `-`, `_`; not first a dot, not as a step's folder";
    Err(Error::new(Code::Usage, what).hint(hint))
}

impl Destination {
    /// A tier by its name, a place, or the last tier.
    fn find(shared: &Shared, to: Option<&str>) -> Result<Self> {
        let config = &shared.tiers.config;
        let named = to.and_then(|to| config.tiers.iter().position(|tier| tier.name == to));
        let last = config.tiers.len().saturating_sub(1);
        match (to, named) {
            (Some(place), None) => Self::place(shared, place),
            (_, named) => {
                let tier = named.unwrap_or(last);
                let side = shared.tiers.side(tier)?;
                let folder = shared.tiers.tier(tier)?.folder.clone();
                let store = side.root.store;
                if !store.sees_all() {
                    let what = "a checkpoint of its own cannot be on the drives of several nodes";
                    return Err(Error::new(Code::Usage, what).at(store.name()));
                }
                Ok(Self { store, limits: side.limits, tier: Some(tier), folder })
            }
        }
    }

    fn place(shared: &Shared, place: &str) -> Result<Self> {
        let folder = folder_of(place);
        let store: Arc<dyn Store> = match &folder {
            Some(folder) => Arc::new(PosixStore::create(folder)?),
            None => open_store(place, &settings_of(shared, place))?,
        };
        let limits = Limits::new(Arc::clone(&shared.tiers.clock), Caps::default());
        Ok(Self { store, limits: Arc::new(limits), tier: None, folder })
    }
}

/// A bucket that a tier is in is reached as that tier is.
fn settings_of(shared: &Shared, place: &str) -> StoreSettings {
    let bucket = |place: &str| place.split('/').take(3).collect::<Vec<_>>().join("/");
    let tiers = &shared.tiers.config.tiers;
    let same = tiers.iter().find(|tier| bucket(&tier.place) == bucket(place));
    same.map(|tier| tier.store.clone()).unwrap_or_default()
}

/// Copies from the nearest tier that has the step and can be read; returns which that was.
fn copy(
    shared: &Shared,
    promotion: &Promotion<'_>,
    destination: &Destination,
) -> Result<(usize, HopReport)> {
    let step = promotion.step;
    let inside = Inside::new(Arc::clone(&destination.store), &step_folder(step), promotion.name);
    let root = Root {
        store: Arc::new(inside),
        clock: Arc::clone(&shared.tiers.clock),
        identify: Arc::new(OurMetadata),
    };
    let to = Side { root, limits: Arc::clone(&destination.limits) };
    let options = HopOptions {
        part_bytes: shared.tiers.config.moving.part_bytes,
        files_at_once: shared.tiers.config.moving.files_at_once,
        priority: Priority::Archive,
        who: promotion.who.to_owned(),
        ..HopOptions::default()
    };
    let mut first: Option<Error> = None;
    for from in sources(shared, step) {
        let (to_tier, priority) = (destination.tier.unwrap_or(from), Priority::Archive);
        let order = Order { step, from, to: to_tier, priority, replaces: None };
        let moving = Moving::new(order, 0);
        let watch = Watch { moving: &moving, stop: &shared.stop };
        // Not made where it is not there.
        let side = shared.tiers.existing(from).and_then(|_| shared.tiers.side(from));
        // The drives of nodes bring it to the next tier.
        if side.as_ref().is_ok_and(|side| !side.root.store.sees_all()) {
            continue;
        }
        match side.and_then(|side| hop(&side, &to, step, &options, &watch)) {
            Ok(report) => return Ok((from, report)),
            // Another tier would meet the same.
            Err(error) if error.code() == Code::LostCommit => {
                let what = format!("{} is there already, and another step", promotion.name);
                let error = Error::new(Code::LostCommit, what).at(to.root.store.name());
                return Err(error.hint("remove that folder, or give another name"));
            }
            Err(error) if error.code() == Code::Cancelled => return Err(error),
            Err(error) if is_absent(&error) && first.is_some() => {}
            Err(error) => first = Some(error),
        }
    }
    let none = || Error::new(Code::NotFound, format!("no tier has step {step}"));
    Err(first.unwrap_or_else(none))
}

fn is_absent(error: &Error) -> bool {
    matches!(error.code(), Code::NotCommitted | Code::NotFound)
}

/// All tiers, those first that have the commit that counts: where a job went back to an earlier step others may still
/// have the one that it replaces.
fn sources(shared: &Shared, step: u64) -> Vec<usize> {
    let state = shared.lock();
    let picture = shared.picture(&state);
    let mut tiers: Vec<usize> = (0..shared.tiers.count()).collect();
    tiers.sort_by_key(|tier| !picture.counts(*tier, step));
    tiers
}

fn log(
    shared: &Shared,
    promotion: &Promotion<'_>,
    from: usize,
    report: &HopReport,
    destination: &Destination,
) {
    let root = shared.tiers.existing(from).ok();
    shared.log(Event {
        who: promotion.who.to_owned(),
        what: "promote".to_owned(),
        origin: "request".to_owned(),
        step: Some(promotion.step),
        attempt: Some(report.attempt.to_string()),
        from: root.as_ref().map(|root| root.store.name()),
        to: Some(format!("{}/{}", destination.store.name(), promotion.name)),
        checksum: root.and_then(|root| shared.checksum_of(&root, promotion.step)),
        note: None,
    });
}

/// Where the export of a promoted step is.
fn exported(folder: &Path, name: &str) -> PathBuf {
    folder.join(format!("{name}-safetensors"))
}

/// Fails where there is an export by that name already, and no step that it could be of.
fn check_unexported(folder: &Path, name: &str) -> Result<()> {
    let to = exported(folder, name);
    if !to.exists() || folder.join(name).join(METADATA).exists() {
        return Ok(());
    }
    let what = "an export of another step is there";
    let error = Error::new(Code::AlreadyExists, what).at(to.display());
    Err(error.hint("remove it, or give another name"))
}

/// Writes the promoted step as safetensors beside it; returns a line that says so. It appears there whole, so what is
/// there is done.
fn export_to(folder: &Path, name: &str) -> Result<String> {
    let to = exported(folder, name);
    if to.is_dir() {
        return Ok(format!("{} was there", to.display()));
    }
    let options = Options {
        format: Format::Safetensors,
        dtype: None,
        renames: Vec::new(),
        select: None,
        max_shard_bytes: SHARD_BYTES,
        aliases: Aliases::Note,
        flat: false,
        overwrite: false,
    };
    let from = folder.join(name);
    let exported = export(from.as_path(), &to, &options, &Unwatched)?;
    let (tensors, bytes) = (exported.tensors, exported.bytes);
    Ok(format!("{tensors} tensors, {bytes} bytes, in {}", to.display()))
}
