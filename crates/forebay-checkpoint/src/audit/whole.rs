//! A manifest as a whole: what its sections say of each other.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};

use sha2::{Digest, Sha256};

use super::Findings;
use super::cover;
use super::cursor::{Check, Cursor};
use super::cuts::Cut;
use super::part::{Chunk, Part, Place};
use super::rows::{Row, What, bits};
use super::sections;
use super::structure;
use super::tables::{self, Holders, IndexRow, Tables};

/// A chunk, with the rank that has it.
type Held = (u64, Cut);

pub(super) fn check(bytes: &[u8], seal: Option<&[u8; 32]>, findings: &mut Findings) {
    let Some(sections) = sections::read(bytes, seal, findings) else { return };
    let [info, meshes, table, index, lists, parts] = sections;
    let Some(tables) = tables::read([info, meshes, table, index, lists], findings) else { return };
    findings.keep("structure", structure::check(&tables));
    let mut held: Vec<Vec<Held>> = tables.rows.iter().map(|_| Vec::new()).collect();
    let mut names = HashSet::new();
    let mut cursor = Cursor(parts);
    for (rank, entry) in (0..).zip(&tables.index) {
        let place = format!("part of rank {rank}");
        let Some(bytes) = findings.keep(&place, cursor.slice(entry.bytes)) else { return };
        if <[u8; 32]>::from(Sha256::digest(bytes)) != entry.digest {
            findings.add(&place, "wrong hash");
        }
        let Some(part) = findings.keep(&place, Part::read(bytes)) else { continue };
        findings.keep(&place, check_who(&tables, &part, rank, entry));
        for file in &part.files {
            let bad = file.name.is_empty()
                || file.name.starts_with('.')
                || file.name.contains(['/', '\\'])
                || file.name.chars().any(char::is_control);
            if bad || !names.insert(file.name.clone()) {
                findings.add(&place, format!("file name {:?} unsafe or twice there", file.name));
            }
        }
        findings.keep(&place, check_bytes(&part));
        findings.keep(&place, take_chunks(&tables, &part, &mut held));
    }
    findings.keep("section parts", cursor.done());
    for ((row, holders), held) in tables.rows.iter().zip(&held) {
        let place = format!("{:?}", row.name);
        findings.keep(&place, check_row(&tables, row));
        findings.keep(&place, check_cover(row, held));
        findings.keep(&place, check_holders(&tables, row, holders, held));
    }
}

fn check_who(tables: &Tables<'_>, part: &Part, rank: u64, entry: &IndexRow) -> Check<()> {
    if part.rank != rank || part.world != tables.world || part.attempt != tables.attempt {
        return Err("of another rank, job or attempt".into());
    }
    if part.files.len() as u64 != entry.files {
        return Err(format!("{} files, the index says {}", part.files.len(), entry.files));
    }
    let data: u64 = part.chunks.iter().map(Chunk::data_bytes).sum();
    if data != entry.data_bytes {
        return Err(format!("{data} bytes of data, the index says {}", entry.data_bytes));
    }
    let Some((hash, values)) = part.structure else { return Ok(()) };
    let hash = hash.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
    match tables.structure.as_ref() == Some(&hash) && values == tables.shared.len() as u64 {
        true => Ok(()),
        false => Err("of another structure".into()),
    }
}

/// Items lie inside of their files, and no two share a byte.
fn check_bytes(part: &Part) -> Check<()> {
    let mut by_file: BTreeMap<usize, Vec<(u64, u64)>> = BTreeMap::new();
    for chunk in &part.chunks {
        let [start, _, _, end] = chunk.item;
        by_file.entry(chunk.file).or_default().push((start, end));
    }
    for (file, mut spans) in by_file {
        let file = part.files.get(file).ok_or("a file that is not listed")?;
        spans.sort_unstable();
        if spans.windows(2).any(|pair| matches!(pair, [a, b] if b.0 < a.1)) {
            return Err(format!("two items of {} share bytes", file.name));
        }
        if spans.iter().any(|span| span.1 > file.bytes) {
            return Err(format!("an item ends past the {} bytes of {}", file.bytes, file.name));
        }
    }
    Ok(())
}

/// Finds the region of each chunk, checks its bytes, and gives it to its value.
fn take_chunks(tables: &Tables<'_>, part: &Part, held: &mut [Vec<Held>]) -> Check<()> {
    let shared = part.structure.map_or(0, |(_, values)| values);
    let mut seen: HashMap<usize, usize> = HashMap::new();
    for chunk in &part.chunks {
        let number = match chunk.value.checked_sub(shared) {
            None => usize::try_from(chunk.value).ok().and_then(|at| tables.shared.get(at)).copied(),
            Some(own) => usize::try_from(own)
                .ok()
                .and_then(|at| part.own.get(at))
                .and_then(|row| tables.numbers.get(&row.name))
                .copied(),
        };
        let row = number.and_then(|number| Some((number, tables.rows.get(number)?)));
        let (number, (row, _)) = row.ok_or("a chunk of a value that is not in the table")?;
        let region = region(tables, part, chunk, row, seen.entry(number).or_default())
            .map_err(|what| format!("{:?}: {what}", row.name))?;
        held.get_mut(number).ok_or("no such row")?.push((part.rank, region));
    }
    for own in &part.own {
        let known = tables.numbers.get(&own.name).and_then(|&number| tables.rows.get(number));
        if known.is_none_or(|(row, _)| row != own) {
            return Err(format!("{:?} is not so in the table", own.name));
        }
    }
    Ok(())
}

fn region(
    tables: &Tables<'_>,
    part: &Part,
    chunk: &Chunk,
    row: &Row,
    seen: &mut usize,
) -> Check<Cut> {
    let (dtype, shape, layout) = match &row.what {
        What::Alias(_) => return Err("bytes of an alias".into()),
        What::Object => {
            let [start, data, data_end, end] = chunk.item;
            return match (&chunk.place, start == data && data_end == end) {
                (Place::Whole, true) => Ok((Vec::new(), Vec::new())),
                _ => Err("an object that is not stored as a whole".into()),
            };
        }
        What::Tensor { dtype, shape, layout, .. } => (dtype, shape, layout),
    };
    let cut = match &chunk.place {
        Place::Whole => (vec![0; shape.len()], shape.clone()),
        Place::Box(cut) => cut.clone(),
        Place::Implied => {
            let layout = layout.ok_or("a box of no layout")?;
            let boxes = tables.layouts.boxes(layout, shape, part.rank)?;
            *seen += 1;
            boxes.into_iter().nth(*seen - 1).ok_or("a box that the layout does not have")?
        }
    };
    let inside = cut.0.len() == shape.len()
        && cut.1.len() == shape.len()
        && cut.0.iter().zip(&cut.1).zip(shape).all(|((&offset, &size), &side)| {
            offset.checked_add(size).is_some_and(|end| end <= side)
        });
    if !inside {
        return Err(format!("a chunk at {:?} of {:?} leaves {shape:?}", cut.0, cut.1));
    }
    let elements = cut.1.iter().try_fold(1u64, |count, &size| count.checked_mul(size));
    let all_bits = elements.and_then(|count| count.checked_mul(bits(dtype).ok()?));
    match all_bits.is_some_and(|all| all % 8 == 0 && all / 8 == chunk.data_bytes()) {
        true => Ok(cut),
        false => Err(format!("{} bytes for {:?} of {dtype}", chunk.data_bytes(), cut.1)),
    }
}

fn check_row(tables: &Tables<'_>, row: &Row) -> Check<()> {
    match &row.what {
        What::Tensor { shape, layout: Some(layout), .. } => {
            tables.layouts.fits(*layout, shape.len())
        }
        What::Alias(of) => {
            let other = tables.numbers.get(of).and_then(|&number| tables.rows.get(number));
            match other.map(|(row, _)| &row.what) {
                None => Err(format!("an alias of {of:?}, which is not there")),
                Some(What::Alias(_)) => Err(format!("an alias of {of:?}, which is one itself")),
                Some(_) => Ok(()),
            }
        }
        _ => Ok(()),
    }
}

fn check_cover(row: &Row, held: &[Held]) -> Check<()> {
    match &row.what {
        What::Alias(_) => Ok(()),
        What::Object if held.len() == 1 => Ok(()),
        What::Object => Err(format!("stored {} times", held.len())),
        What::Tensor { shape, .. } => {
            let boxes: Vec<&Cut> =
                held.iter().map(|(_, cut)| cut).filter(|cut| !cut.1.contains(&0)).collect();
            match shape.contains(&0) {
                true => Ok(()),
                false => cover::check(shape, &boxes),
            }
        }
    }
}

/// The holders in the table are those whose parts have the chunks.
fn check_holders(
    tables: &Tables<'_>,
    row: &Row,
    holders: &Holders<'_>,
    held: &[Held],
) -> Check<()> {
    let some = held.iter().filter(|(_, cut)| !cut.1.contains(&0));
    let ranks: BTreeSet<u64> = some.clone().map(|(rank, _)| *rank).collect();
    let said = match holders {
        Holders::Nobody => BTreeSet::new(),
        Holders::One(rank) => BTreeSet::from([*rank]),
        Holders::Replica(replica) => shard_ranks(tables, row, |_| Ok(Some(*replica)))?,
        Holders::Replicas(list) => {
            let (mut cursor, mut list) = (Cursor(list), Vec::new());
            while !cursor.0.is_empty() {
                list.push(cursor.varint()?);
            }
            shard_ranks(tables, row, |shard| {
                let entry = usize::try_from(shard).ok().and_then(|shard| list.get(shard));
                Ok(entry.ok_or("too few replicas in a list")?.checked_sub(1))
            })?
        }
        Holders::Regions(list) => return check_regions(row, list, some.cloned().collect()),
    };
    let empty = match &row.what {
        What::Tensor { shape, .. } => shape.contains(&0),
        _ => false,
    };
    let nobody_else = said.iter().all(|&rank| rank < tables.world);
    match said == ranks || (empty && nobody_else) {
        true => Ok(()),
        false => Err(format!("held by ranks {ranks:?}, the table says {said:?}")),
    }
}

fn shard_ranks(
    tables: &Tables<'_>,
    row: &Row,
    replica_of: impl Fn(u64) -> Check<Option<u64>>,
) -> Check<BTreeSet<u64>> {
    let What::Tensor { shape, layout: Some(layout), .. } = &row.what else {
        return Err("shards without a layout".into());
    };
    let mut ranks = BTreeSet::new();
    for (rank, shard, replica) in tables.layouts.places(*layout)? {
        if replica_of(shard)? == Some(replica)
            && !tables.layouts.boxes(*layout, shape, rank)?.is_empty()
        {
            ranks.insert(rank);
        }
    }
    Ok(ranks)
}

fn check_regions(row: &Row, list: &[u8], mut held: Vec<Held>) -> Check<()> {
    let What::Tensor { shape, .. } = &row.what else {
        return Err("regions of what is no tensor".into());
    };
    let mut cursor = Cursor(list);
    let mut last = (0, (vec![0; shape.len()], vec![0; shape.len()]));
    let mut said = Vec::new();
    while !cursor.0.is_empty() {
        last.0 = cursor.difference(last.0)?;
        for (offset, size) in last.1.0.iter_mut().zip(&mut last.1.1) {
            *offset = cursor.difference(*offset)?;
            *size = cursor.difference(*size)?;
        }
        if !last.1.1.contains(&0) {
            said.push(last.clone());
        }
    }
    if !said.is_sorted_by_key(|(rank, _)| *rank) {
        return Err("a list of regions is not in the order of the ranks".into());
    }
    said.sort();
    held.sort();
    if said == held { Ok(()) } else { Err("the regions in the table are not those held".into()) }
}
