//! `forebay ckpt export`.
//!
//! JSON: `{"path", "to", "format", "tensors", "objects", "bytes", "files", "aliases": {left out: written}, "left_out":
//! {name: why}, "seconds", "gb_per_s", "warnings"}`.

use std::collections::BTreeMap;
use std::path::Path;

use forebay_checkpoint::commit::{METADATA, numbers};
use forebay_checkpoint::export::{Aliases, Exported, Format, Options, export};
use forebay_checkpoint::open::Place;
use forebay_error::{Code, Error, Result};
use forebay_tensor::Dtype;
use serde::Serialize;

use super::Outcome;
use super::args::{AliasesArg, DtypeArg, ExportArgs, FormatArg};
use super::home::{Home, place as place_of};
use super::place::{self, Step};
use super::watch::Watch;
use crate::console::{Console, clean};
use crate::select::compile;
use crate::units::{count, decimal, gb_per_s, rate};

/// Objects that were left out and are named.
const NAMED: usize = 20;

#[derive(Serialize)]
struct Report {
    path: String,
    to: String,
    format: &'static str,
    tensors: usize,
    objects: usize,
    bytes: u64,
    files: Vec<String>,
    aliases: BTreeMap<String, String>,
    left_out: BTreeMap<String, String>,
    seconds: f64,
    gb_per_s: f64,
    warnings: Vec<String>,
}

/// Runs the command.
pub(super) fn run(args: &ExportArgs, console: &Console) -> Result<Outcome> {
    let format = args.format.unwrap_or_else(|| format_of(&args.to));
    if args.flat && format != FormatArg::Torch {
        return Err(Error::new(Code::Usage, "--flat is for files of torch"));
    }
    let set = compile(&args.select)?;
    let select = |name: &str| args.select.is_empty() || set.is_match(name);
    let options = Options {
        format: match format {
            FormatArg::Safetensors => Format::Safetensors,
            FormatArg::Torch => Format::Torch,
        },
        dtype: args.dtype.map(dtype),
        renames: args.rename.clone(),
        select: Some(&select),
        max_shard_bytes: args.max_shard_bytes,
        aliases: match args.aliases {
            AliasesArg::Note => Aliases::Note,
            AliasesArg::Copy => Aliases::Copy,
        },
        flat: args.flat,
        overwrite: args.overwrite,
    };
    let Place::Local(to) = place_of(&args.to)? else {
        let error = Error::new(Code::Usage, "exports are written to this machine");
        return Err(error
            .at(args.to.display())
            .hint("copy the output with the bucket's own tools"));
    };
    let step = step_or_model(&args.path, args.step)?;
    let watch = Watch::new(console, "exporting", &[&step]);
    let exported = export(&step.place, &to, &options, &watch)?;
    let seconds = watch.seconds();
    drop(watch);
    tell(&exported, console);
    let report = Report {
        path: step.shown(),
        to: args.to.display().to_string(),
        format: if format == FormatArg::Torch { "torch" } else { "safetensors" },
        tensors: exported.tensors,
        objects: exported.objects,
        bytes: exported.bytes,
        files: exported.files,
        aliases: exported.aliases,
        left_out: exported.left_out.into_iter().collect(),
        seconds,
        gb_per_s: gb_per_s(exported.bytes, seconds),
        warnings: exported.warnings,
    };
    match console.is_json() {
        true => console.json(&report)?,
        false => console.print(|out| {
            let objects = match report.objects {
                0 => String::new(),
                number => format!(" and {}", count(number, "object")),
            };
            writeln!(
                out,
                "{}{objects}, {} in {} at {}: {}",
                count(report.tensors, "tensor"),
                decimal(report.bytes),
                count(report.files.len(), "file"),
                rate(report.gb_per_s),
                clean(&report.to)
            )
        })?,
    }
    Ok(Outcome::Good)
}

/// The step that is meant; what is no folder of steps is taken as it is, be it any model.
pub(super) fn step_or_model(path: &Path, number: Option<u64>) -> Result<Step> {
    let model = place_of(path)?.settled()?;
    let file = matches!(&model, Place::Remote { name: Some(name), .. } if name != METADATA);
    let home = Home::parse(path)?;
    let is_steps = !file && home.is_there() && {
        let has_steps = |root| numbers(&root).is_ok_and(|all| !all.is_empty());
        home.has_metadata()? || home.root().is_ok_and(has_steps)
    };
    match is_steps || number.is_some() || path.ends_with(METADATA) {
        true => place::step(path, number),
        false => Ok(Step { place: model, step: None, lease: None }),
    }
}

fn format_of(to: &Path) -> FormatArg {
    match to.extension().and_then(|extension| extension.to_str()) {
        Some("pt" | "pth" | "bin") => FormatArg::Torch,
        _ => FormatArg::Safetensors,
    }
}

fn dtype(dtype: DtypeArg) -> Dtype {
    match dtype {
        DtypeArg::Bf16 => Dtype::BF16,
        DtypeArg::F16 => Dtype::F16,
        DtypeArg::F32 => Dtype::F32,
        DtypeArg::F64 => Dtype::F64,
    }
}

/// Says what is not as it was.
fn tell(exported: &Exported, console: &Console) {
    for warning in &exported.warnings {
        console.warning(warning);
    }
    for (left_out, written) in exported.aliases.iter().take(NAMED) {
        console.warning(&format!(
            "{left_out:?} is the same tensor as {written:?}: written once, noted in the metadata"
        ));
    }
    for (name, why) in exported.left_out.iter().take(NAMED) {
        console.warning(&format!("object {name:?} is left out: {why}"));
    }
    if let Some(more) = exported.left_out.len().checked_sub(NAMED + 1) {
        console.warning(&format!("{} are left out", count(more + 1, "more object")));
    }
    if let Some(more) = exported.aliases.len().checked_sub(NAMED + 1) {
        console.warning(&format!("{} are the same as others", count(more + 1, "more tensor")));
    }
}
