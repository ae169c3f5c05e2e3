//! The sections that say what there is: info, meshes, table, index, lists of holders.

use std::collections::HashMap;

use super::Findings;
use super::crc::crc;
use super::cursor::{Check, Cursor};
use super::cuts::Layouts;
use super::rows::{self, Row, What};
use super::sections::NAMES;

/// Who holds a row's value, as the table says.
pub(super) enum Holders<'a> {
    Nobody,
    One(u64),
    Replica(u64),
    Replicas(&'a [u8]),
    Regions(&'a [u8]),
}

pub(super) struct Tables<'a> {
    pub(super) attempt: String,
    pub(super) world: u64,
    pub(super) structure: Option<String>,
    pub(super) layouts: Layouts,
    pub(super) rows: Vec<(Row, Holders<'a>)>,
    pub(super) numbers: HashMap<String, usize>,
    pub(super) shared: Vec<usize>,
    pub(super) index: Vec<IndexRow>,
}

pub(super) struct IndexRow {
    pub(super) bytes: u64,
    pub(super) files: u64,
    pub(super) data_bytes: u64,
    pub(super) digest: [u8; 32],
}

pub(super) fn read<'a>(sections: [&'a [u8]; 5], findings: &mut Findings) -> Option<Tables<'a>> {
    let [info, meshes, table, index, lists] = sections;
    let [info_name, meshes_name, table_name, index_name, ..] = NAMES;
    let info = serde_json::from_slice(info).map_err(|error| error.to_string());
    let info: serde_json::Value = findings.keep(info_name, info)?;
    let text = |key| info.get(key).and_then(|value| value.as_str()).map(str::to_owned);
    let attempt = findings.keep(info_name, text("attempt").ok_or("no attempt".into()))?;
    let world = info.get("world_size").and_then(serde_json::Value::as_u64);
    let world = findings.keep(info_name, world.ok_or("no world_size".into()))?;
    for key in ["epoch", "step"] {
        if info.get(key).and_then(serde_json::Value::as_u64).is_none() {
            findings.add(info_name, format!("no number {key:?}"));
        }
    }
    if text("run").is_none() {
        findings.add(info_name, "no run");
    }
    let layouts = findings.keep(meshes_name, Layouts::read(meshes))?;
    let rows = findings.keep(table_name, read_table(table, lists))?;
    let index = findings.keep(index_name, read_index(index))?;
    if index.len() as u64 != world {
        findings.add(index_name, format!("{} parts for {world} ranks", index.len()));
    }
    let shared = rows.iter().enumerate().filter(|(_, (row, _))| row.shared);
    let shared = shared.map(|(number, _)| number).collect();
    let numbers = rows.iter().zip(0..).map(|((row, _), number)| (row.name.clone(), number));
    let numbers = numbers.collect();
    let structure = text("structure");
    Some(Tables { attempt, world, structure, layouts, rows, numbers, shared, index })
}

fn read_table<'a>(table: &[u8], lists: &'a [u8]) -> Check<Vec<(Row, Holders<'a>)>> {
    let (mut cursor, mut lists) = (Cursor(table), Cursor(lists));
    let rows = rows::read(&mut cursor, |cursor, row| {
        if matches!(row.what, What::Alias(_)) {
            return Ok(Holders::Nobody);
        }
        let kind = cursor.varint()?;
        Ok(match kind {
            0 => Holders::Nobody,
            1 => Holders::One(cursor.varint()?),
            2 => Holders::Replica(cursor.varint()?),
            3 | 4 => {
                let list = lists.slice(cursor.varint()?)?;
                if cursor.crc()? != crc(list) {
                    return Err("a list of holders has a wrong checksum".into());
                }
                if kind == 3 { Holders::Replicas(list) } else { Holders::Regions(list) }
            }
            other => return Err(format!("holders of kind {other}")),
        })
    })?;
    cursor.done()?;
    lists.done()?;
    Ok(rows)
}

fn read_index(bytes: &[u8]) -> Check<Vec<IndexRow>> {
    let mut cursor = Cursor(bytes);
    let count = cursor.count()?;
    let mut columns: [Vec<u64>; 3] = Default::default();
    for column in &mut columns {
        for _ in 0..count {
            column.push(cursor.varint()?);
        }
    }
    let [bytes, files, data] = columns;
    let mut rows = Vec::new();
    for ((bytes, files), data_bytes) in bytes.into_iter().zip(files).zip(data) {
        rows.push(IndexRow { bytes, files, data_bytes, digest: cursor.digest()? });
    }
    cursor.done()?;
    Ok(rows)
}
