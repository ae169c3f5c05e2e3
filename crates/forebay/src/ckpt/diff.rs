//! `forebay ckpt diff`.
//!
//! JSON: `{"a", "b", "equal", "equal_tensors", "equal_objects", "compared_bytes", "seconds", "changes"}`. A change
//! has `name` and `change`, which is `only_in_a`, `only_in_b`, `kind`, `form` (with `a` and `b`: type and sides),
//! `values` (with `elements`, `differing`, `max_abs` or null, `not_finite`) or `object` (with `a` and `b`: JSON as
//! text, where it is plain and short, or null).

use forebay_checkpoint::diff::{Change, Diff, diff};
use forebay_error::{Code, Error, Result};
use serde::Serialize;

use super::Outcome;
use super::args::DiffArgs;
use super::export::step_or_model;
use super::watch::Watch;
use crate::console::{Console, clean};
use crate::select::compile;
use crate::units::{count, decimal};

#[derive(Serialize)]
struct Report {
    a: String,
    b: String,
    equal: bool,
    equal_tensors: usize,
    equal_objects: usize,
    compared_bytes: u64,
    seconds: f64,
    changes: Vec<Row>,
}

#[derive(Default, Serialize)]
struct Row {
    name: String,
    change: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    a: Option<Option<String>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    b: Option<Option<String>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    elements: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    differing: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    max_abs: Option<Option<f64>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    not_finite: Option<u64>,
}

/// Runs the command.
pub(super) fn run(args: &DiffArgs, console: &Console) -> Result<Outcome> {
    let set = compile(&args.select)?;
    let select = |name: &str| args.select.is_empty() || set.is_match(name);
    let (a, b) = (step_or_model(&args.a, None)?, step_or_model(&args.b, None)?);
    let watch = Watch::new(console, "comparing", &[&a, &b]);
    let found = diff(&a.place, &b.place, select, &watch)?;
    let seconds = watch.seconds();
    drop(watch);
    for warning in &found.warnings {
        console.warning(warning);
    }
    let equal = found.is_equal();
    let nothing = equal && found.equal_tensors == 0 && found.equal_objects == 0;
    if nothing && !args.select.is_empty() {
        let hint = "`forebay ckpt show` and `forebay inspect` list the names";
        return Err(Error::new(Code::Usage, "no tensor is selected").hint(hint));
    }
    let written = match console.is_json() {
        true => console.json(&Report {
            a: a.shown(),
            b: b.shown(),
            equal,
            equal_tensors: found.equal_tensors,
            equal_objects: found.equal_objects,
            compared_bytes: found.bytes,
            seconds,
            changes: found.changes.iter().map(|(name, change)| row(name, change)).collect(),
        }),
        false => console.print(|out| print(out, &found)),
    };
    Outcome::good_if(equal).told(written, console)
}

fn row(name: &str, change: &Change) -> Row {
    let named = |change| Row { name: name.to_owned(), change, ..Row::default() };
    match change {
        Change::OnlyInA => named("only_in_a"),
        Change::OnlyInB => named("only_in_b"),
        Change::Kind => named("kind"),
        Change::Form(a, b) => {
            Row { a: Some(Some(a.clone())), b: Some(Some(b.clone())), ..named("form") }
        }
        Change::Values(found) => Row {
            elements: Some(found.elements),
            differing: Some(found.differing),
            max_abs: Some(found.max_abs),
            not_finite: Some(found.not_finite),
            ..named("values")
        },
        Change::Object(a, b) => Row { a: Some(a.clone()), b: Some(b.clone()), ..named("object") },
    }
}

fn print(out: &mut dyn std::io::Write, found: &Diff) -> std::io::Result<()> {
    for (name, change) in &found.changes {
        writeln!(out, "{}: {}", clean(name), clean(&text(change)))?;
    }
    let verdict = match found.changes.len() {
        0 => "equal".to_owned(),
        number => format!("{number} different"),
    };
    writeln!(
        out,
        "{verdict}; {} and {} the same, {} compared",
        count(found.equal_tensors, "tensor"),
        count(found.equal_objects, "object"),
        decimal(found.bytes)
    )
}

fn text(change: &Change) -> String {
    match change {
        Change::OnlyInA => "only in A".to_owned(),
        Change::OnlyInB => "only in B".to_owned(),
        Change::Kind => "a tensor in one, an object in the other".to_owned(),
        Change::Form(a, b) => format!("{a} in A, {b} in B"),
        Change::Values(found) => {
            let mut text = format!("{} of {} elements differ", found.differing, found.elements);
            if let Some(most) = found.max_abs {
                text.push_str(&format!(", by {most:e} at most"));
            }
            if found.not_finite > 0 {
                text.push_str(&format!(", {} infinite or NaN", found.not_finite));
            }
            text
        }
        Change::Object(Some(a), Some(b)) => format!("{a} in A, {b} in B"),
        Change::Object(..) => "another object".to_owned(),
    }
}
