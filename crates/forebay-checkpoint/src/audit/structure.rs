//! The structure hash, from the text in `manifest::structure_hash`: parts refer to values by numbers in the structure
//! of that hash, so the table must have that one.

use sha2::{Digest, Sha256};

use super::cursor::Check;
use super::cuts::{Layouts, Place};
use super::rows::{Row, What};
use super::tables::Tables;

/// The hash in the info text is that of the shared rows, with all meshes and layouts.
pub(super) fn check(tables: &Tables<'_>) -> Check<()> {
    let rows = tables.shared.iter().filter_map(|&number| tables.rows.get(number));
    let rows: Vec<&Row> = rows.map(|(row, _)| row).collect();
    let Some(said) = &tables.structure else {
        return match rows.is_empty() {
            true => Ok(()),
            false => Err("rows of a structure that has no hash".into()),
        };
    };
    let found = hash(&tables.layouts, &rows)?;
    match *said == found {
        true => Ok(()),
        false => Err(format!("the structure hash is said to be {said:.16}, it is {found:.16}")),
    }
}

fn hash(layouts: &Layouts, rows: &[&Row]) -> Check<String> {
    let mut text = b"forebay structure 1\n".to_vec();
    spell(layouts, &mut |number| put(&mut text, number));
    put(&mut text, rows.len() as u64);
    for row in rows {
        put_text(&mut text, &row.name);
        put(&mut text, row.path.len() as u64);
        for (is_index, step) in &row.path {
            put(&mut text, u64::from(*is_index));
            match is_index {
                true => put(&mut text, step.parse().map_err(|_| "a place that is no number")?),
                false => put_text(&mut text, step),
            }
        }
        match &row.what {
            What::Tensor { dtype, shape, grad, layout } => {
                put(&mut text, 0);
                put_text(&mut text, dtype);
                put(&mut text, u64::from(*grad));
                put(&mut text, layout.map_or(0, |layout| layout + 1));
                put(&mut text, shape.len() as u64);
                shape.iter().for_each(|&side| put(&mut text, side));
            }
            What::Object => put(&mut text, 1),
            What::Alias(of) => {
                put(&mut text, 2);
                put_text(&mut text, of);
            }
        }
    }
    Ok(Sha256::digest(&text).iter().map(|byte| format!("{byte:02x}")).collect())
}

/// Meshes and layouts as the structure hash has them.
fn spell(layouts: &Layouts, put: &mut impl FnMut(u64)) {
    put(layouts.meshes.len() as u64);
    for mesh in &layouts.meshes {
        put(mesh.sides.len() as u64);
        mesh.sides.iter().for_each(|&side| put(side));
        let listed = mesh.ranks.as_ref().filter(|ranks| !ranks.iter().copied().eq(0..mesh.size()));
        put(u64::from(listed.is_some()));
        listed.into_iter().flatten().for_each(|&rank| put(rank));
    }
    put(layouts.layouts.len() as u64);
    for layout in &layouts.layouts {
        put(layout.mesh as u64);
        put(u64::from(layout.right_to_left));
        put(layout.places.len() as u64);
        for place in &layout.places {
            let three = match *place {
                Place::All => [0, 0, 0],
                Place::Shard(dim) => [1, dim, 0],
                Place::Strided(dim, split) => [2, dim, split],
            };
            three.into_iter().for_each(&mut *put);
        }
    }
}

fn put(text: &mut Vec<u8>, number: u64) {
    text.extend_from_slice(&number.to_le_bytes());
}

fn put_text(text: &mut Vec<u8>, of: &str) {
    put(text, of.len() as u64);
    text.extend_from_slice(of.as_bytes());
}
